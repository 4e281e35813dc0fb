"""What loads, what is refused, and what a checkpoint says about itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import checkpoints
from tests.model.paging import PagedSequences

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError
from stemma.model.files.tiny import write_tiny_model
from stemma.model.load.loading import load_model
from stemma.model.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generation = {"eos_token_id": [2, 0], "temperature": 0.7, "top_k": 20, "do_sample": True}
    return checkpoints.build(
        "qwen2", tmp_path_factory.mktemp("m") / "qwen2", generation=generation, eos_token_id=[2, 5, 512]
    )


def load(path: Path, **settings: object) -> object:
    return load_model(ModelSettings.model_validate({"path": path, "device": "cpu", **settings}))


def test_what_the_checkpoint_says(qwen2: Path) -> None:
    stages: list[str] = []
    model = load_model(ModelSettings(path=qwen2, device="cpu"), lambda stage, share: stages.append(stage))
    assert model.max_model_len == 2048
    assert model.eos_token_ids == (2, 0, 5)
    assert model.default_sampling == {"temperature": 0.7, "top_k": 20}
    assert model.vocab_size == 512
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert model.layout(16).block_shape == (2, 2, 16, 2, 16)
    assert model.layout(16).dtype == "float32"
    plain_bytes = sum(t.numel() * 4 for t in load_file(qwen2 / "model.safetensors").values())
    assert model.weight_bytes == plain_bytes
    assert {"loading weights", "packing weights", "ready"} <= set(stages)


def test_latent_layout(tmp_path: Path) -> None:
    """DeepSeek caches one latent of rank 32 plus a rotary key of 8, not keys and values of 4 heads."""
    model = load_model(ModelSettings(path=checkpoints.build("deepseek-v3", tmp_path), device="cpu"))
    assert model.layout(16).block_shape == (3, 1, 16, 1, 40)


def test_greedy_by_generation_config(tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path, generation={"do_sample": False, "temperature": 0.3})
    assert load_model(ModelSettings(path=path, device="cpu")).default_sampling == {"temperature": 0.0}


def test_a_sampling_default_that_no_float_holds_is_ignored(tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path, generation={"top_p": 10**400, "temperature": -(10**400)})
    assert load_model(ModelSettings(path=path, device="cpu")).default_sampling == {}


def test_dtype_and_context_as_asked(qwen2: Path) -> None:
    model = load_model(ModelSettings(path=qwen2, device="cpu", dtype="bfloat16", max_model_len=100))
    assert model.dtype == torch.bfloat16
    assert model.max_model_len == 100


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no checkpoint directory"):
        load(tmp_path / "nowhere")


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "no-such-model"}'])
def test_broken_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError):
        load(tmp_path)


def test_not_a_causal_lm(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="BertForMaskedLM, which is no causal"):
        load(checkpoints.build_masked_lm(tmp_path))


def test_no_weights(qwen2: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((qwen2 / "config.json").read_bytes())
    with pytest.raises(ModelError, match="can't load"):
        load(tmp_path)


def test_incomplete_weights(qwen2: Path, tmp_path: Path) -> None:
    """A weight that is missing must not be made up."""
    (tmp_path / "config.json").write_bytes((qwen2 / "config.json").read_bytes())
    weights = load_file(qwen2 / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 weights"):
        load(tmp_path)


def test_truncated_weights(qwen2: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((qwen2 / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((qwen2 / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError):
        load(tmp_path)


def test_foreign_code_needs_permission(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}, "architectures": ["Own"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="trust_remote_code"):
        load(tmp_path)


def test_context_beyond_the_model(qwen2: Path) -> None:
    with pytest.raises(ConfigError, match="ends at 2048"):
        load(qwen2, max_model_len=4096)


def test_rotary_embedding_that_depends_on_the_whole_context(tmp_path: Path) -> None:
    """Dynamic NTK turns all keys anew beyond the trained length: KV can't be reused there."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    path = checkpoints.build("llama", tmp_path, rope_parameters=rope)
    assert load_model(ModelSettings(path=path, device="cpu")).max_model_len == 512
    with pytest.raises(ConfigError, match="ends at 512"):
        load(path, max_model_len=1024)


def test_unknown_device(qwen2: Path) -> None:
    with pytest.raises(ConfigError):
        load(qwen2, device="abacus")


def test_tiny_model_for_the_demo(tmp_path: Path) -> None:
    """Small, seeded, real: it loads, has a chat template, and equal seeds give equal files."""
    first = write_tiny_model(tmp_path / "a", seed=3)
    second = write_tiny_model(tmp_path / "b", seed=3)
    other = write_tiny_model(tmp_path / "c", seed=4)
    weights = [(path / "model.safetensors").read_bytes() for path in (first, second, other)]
    assert weights[0] == weights[1] != weights[2]
    assert len(weights[0]) < 10_000_000
    tokenizer = Tokenizer(first)
    text = "Grüße, 世界! \n 12"
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}]).tolist()
    assert tokenizer.decode(chat, skip_special_tokens=False).endswith(
        "Hello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert load_model(ModelSettings(path=first, device="cpu")).eos_token_ids == (tokenizer.eos_token_id,)


def in_one_part(path: Path, index: dict[str, object]) -> Path:
    """Give a checkpoint's weights an index of one file, with these fields beside the map."""
    file = (path / "model.safetensors").rename(path / "part.safetensors")
    weight_map = dict.fromkeys(load_file(file), file.name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, **index}))
    return path


@pytest.mark.parametrize("family", ["gemma2", "qwen3-moe"])
@pytest.mark.parametrize("index", [{}, {"metadata": None}, {"metadata": [1]}])
def test_an_index_without_metadata(family: str, index: dict[str, object], tmp_path: Path) -> None:
    """transformers, which loads these families, asks for it and doesn't use it."""
    path = checkpoints.build(family, tmp_path)
    tokens = [5, 6, 7, 8]
    answers = []
    for place in (path, in_one_part(path, index)):
        sequences = PagedSequences(load_model(ModelSettings(path=place, device="cpu")), [tokens])
        sequences.step([(0, len(tokens))])
        answers.append(sequences.logits[0])
    assert torch.equal(*answers)
