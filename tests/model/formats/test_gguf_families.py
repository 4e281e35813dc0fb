"""GGUF files whose tensors llama.cpp changes: put in another order, cut apart, in other numbers."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError
from stemma.model.files.gguf_header import read_header
from stemma.model.formats.gguf.vocabulary import end_token_ids
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from tests import gguf_files
from tests.gguf_layouts import LAYOUTS
from tests.model.paging import PagedSequences, plain_logits

TOLERANCE = 1e-4


def load(path: Path) -> CausalLM:
    return load_model(ModelSettings(path=path, dtype="float32", device="cpu"))


def logits_of(model: CausalLM, prompt: list[int]) -> torch.Tensor:
    run = PagedSequences(model, [prompt])
    run.finish(chunk=17)
    return run.logits[0]


def prompt_of(length: int) -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(500) for _ in range(length)]


def mixed(name: str) -> Kind:
    """A type for each tensor, as files of mixtures have them: gates in another one than ups."""
    return Kind.Q8_0 if any(part in name for part in ("in_proj", "down", "attn")) else Kind.Q4_0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, Kind.Q8_0) for family in LAYOUTS if family != "gpt-oss"),
        *(("gpt-oss", Kind.MXFP4), ("qwen3-next", Kind.MXFP4), ("qwen3.5-moe", mixed), ("granite", mixed)),
    ],
)
def test_changed_tensors_stay_quantized(family: str, kind: Any, tmp_path: Path) -> None:
    """Rows in another order, columns by head, tensors joined, experts stacked, of one type or two."""
    file = gguf_files.build(family, tmp_path, kind)
    model = load(file.path)
    prompt = prompt_of(40)
    torch.testing.assert_close(
        logits_of(model, prompt), plain_logits(file.plain, prompt), atol=TOLERANCE, rtol=0
    )
    kept, _, widened = model.info.formats.partition("kept quantized")
    assert kept
    assert not re.search(r"; \d+ \w+ as float32", widened)


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe", "lfm2"])
def test_transformers_reads_these_files_alike(family: str, tmp_path: Path) -> None:
    path = gguf_files.build(family, tmp_path).path
    auto: Any = AutoModelForCausalLM
    theirs = auto.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    prompt = prompt_of(60)
    with torch.inference_mode():
        expected = theirs.eval()(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(load(path), prompt), expected, atol=TOLERANCE, rtol=0)


def test_a_layer_that_guesses_tokens_is_left_out(tmp_path: Path) -> None:
    """As Qwen3.5's files count it: behind the last layer, among the layers."""
    extra = {f"blk.4.{name}.weight": np.ones(64, np.float32) for name in ("attn_norm", "nextn.enorm")}
    metadata = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    file = gguf_files.build("qwen3.5", tmp_path, metadata=metadata, extra=extra)
    prompt = prompt_of(20)
    torch.testing.assert_close(
        logits_of(load(file.path), prompt), plain_logits(file.plain, prompt), atol=TOLERANCE, rtol=0
    )


def test_older_files_of_qwen3_next_have_joined_inputs(tmp_path: Path) -> None:
    plain = gguf_files.build("qwen3-next", tmp_path / "new")
    joined = gguf_files.build("qwen3-next-older", tmp_path / "old")
    prompt = prompt_of(20)
    assert "blk.0.ssm_in.weight" in read_header(joined.path).tensors
    assert torch.equal(logits_of(load(joined.path), prompt), logits_of(load(plain.path), prompt))


def test_long_rope_of_phi_3(tmp_path: Path) -> None:
    """Factors lie in the file as tensors; the context ends where they would change."""
    factors = [[1.0 + 0.1 * number for number in range(8)], [2.0 + number for number in range(8)]]
    rope = {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 1.0},
        **{"short_factor": factors[0], "long_factor": factors[1]},
        **{"original_max_position_embeddings": 512, "attention_factor": 1.25},
    }
    file = gguf_files.build(
        "phi3",
        tmp_path,
        rope_parameters=rope,
        original_max_position_embeddings=512,
        metadata={"phi3.rope.scaling.type": "longrope", "phi3.rope.scaling.attn_factor": 1.25},
        extra={
            f"rope_factors_{name}.weight": np.array(values, np.float32)
            for name, values in zip(("short", "long"), factors, strict=True)
        },
    )
    model, prompt = load(file.path), prompt_of(60)
    assert model.max_model_len == 512
    torch.testing.assert_close(
        logits_of(model, prompt), plain_logits(file.plain, prompt), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("qwen3-next", {"qwen3next.ssm.group_count": 3}, "must divide each other"),
        ("qwen3-next", {"qwen3next.ssm.state_size": 8}, "ssm_conv1d is"),
        ("qwen3-next", {"qwen3next.full_attention_interval": 3}, "no tensor blk.2.attn_q"),
        ("qwen3.5", {"qwen35.nextn_predict_layers": 4}, "nextn_predict_layers is 4"),
        ("lfm2", {"lfm2.attention.head_count_kv": [2, 2]}, "a whole number for each of 3 layers"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, -1, 0]}, "a whole number for each of 3 layers"),
        ("granite", {"granitehybrid.ssm.inner_size": 100}, "isn't made of 8 heads"),
        ("granite", {"granitehybrid.expert_shared_feed_forward_length": 5}, "the tensors have 64"),
        ("gpt-oss", {"gpt-oss.expert_count": 3}, "expert_count isn't that of its tensors"),
        ("phi3", {"phi3.attention.head_count_kv": 1}, "head_count makes"),
        ("glm4", {"glm4.rope.dimension_sections": [8, 12, 12, 0]}, "images"),
        ("olmo3", {"olmo2.attention.sliding_window_pattern": 4}, "one value a layer"),
        ("mixtral", {"llama.feed_forward_length": 5}, "feed_forward_length"),
    ],
)
def test_metadata_that_contradict_changed_tensors_are_refused(
    family: str, metadata: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = gguf_files.build(family, tmp_path, metadata=metadata).path
    with pytest.raises(ModelError, match=re.escape(message)):
        load(path)


@pytest.mark.parametrize(
    ("special", "ends"),
    [
        (("<|end|>", "<|user|>"), ("<|end|>",)),
        (("<|end|>", "<|return|>", "<|call|>"), ("<|return|>", "<|call|>")),
        (("<|user|>", "<|observation|>"), ("<|observation|>",)),
    ],
)
def test_tokens_that_end_an_answer(special: tuple[str, ...], ends: tuple[str, ...], tmp_path: Path) -> None:
    """Phi-3's, GPT-OSS', in which one of them ends a message only, and GLM-4's."""
    tokens = [f"token {number}" for number in range(20)] + list(special)
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 20 + [3] * len(special),
        "tokenizer.ggml.eos_token_id": 4,
    }
    header = read_header(gguf_files.build("phi3", tmp_path, metadata=metadata).path)
    assert end_token_ids(header) == (4, *(tokens.index(text) for text in ends))
