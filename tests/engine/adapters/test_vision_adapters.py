"""Adapters of models that read images: of the language model by PEFT's names; the encoder's are refused."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vision_checkpoints import VISION_FAMILIES, lay_out_as_published, make_vision_checkpoint, picture
from transformers import AutoModelForImageTextToText

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import AdapterError
from stemma.native.library import load_kernels

peft = pytest.importorskip("peft", reason="PEFT is the oracle")
pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

LANGUAGE_MODEL = r".*\.(language_model|text_model)\..*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SMALL: dict[str, Any] = {"kv_cache_memory": "8MB", "block_size": 16, "num_threads": 1, "device": "cpu"}


def adapted(checkpoint: Path, path: Path, targets: Any) -> Path:
    """Write an adapter as PEFT does, and beside it the checkpoint into which PEFT merged it."""
    base = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        model.save_pretrained(str(path))
        shutil.copytree(checkpoint, path / "merged")
        model.merge_and_unload().save_pretrained(path / "merged")
    return path


def chats() -> list[list[dict[str, Any]]]:
    image = {"type": "image", "image": picture(1)}
    questions = ("What is this?", "And what is that? " * 4)
    seen = [[image, {"type": "text", "text": question}] for question in questions]
    return [*([{"role": "user", "content": one}] for one in seen), [{"role": "user", "content": "Hello."}]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_answers_are_those_of_the_merged_model(family: str, tmp_path: Path) -> None:
    checkpoint = make_vision_checkpoint(family, tmp_path / "model")
    path = adapted(checkpoint, tmp_path / "adapter", LANGUAGE_MODEL)
    lay_out_as_published(family, path / "merged")

    def tokens(llm: LLM, lora: str | None) -> list[list[int]]:
        return [one.completions[0].token_ids for one in llm.chat(chats(), GREEDY, lora=lora)]

    merged = LLM(path / "merged", **SMALL)
    expected = tokens(merged, None)
    merged.close()
    llm = LLM(checkpoint, lora={"one": path}, **SMALL)
    plain = tokens(llm, None)
    for _ in range(2):
        assert tokens(llm, "one") == expected
        assert tokens(llm, None) == plain
    assert plain != expected
    assert llm.stats().num_encoded_images == 1, "an adapter doesn't change what the encoder makes"
    llm.close()


@pytest.mark.parametrize(("family", "target"), [("smolvlm", "q_proj"), ("qwen2.5-vl", "qkv")])
def test_layers_of_the_encoder_are_refused_by_name(family: str, target: str, tmp_path: Path) -> None:
    checkpoint = make_vision_checkpoint(family, tmp_path / "model")
    path = adapted(checkpoint, tmp_path / "adapter", [target])
    with pytest.raises(AdapterError, match=rf"adapts model\.vis.*{target}, which isn't served"):
        LLM(checkpoint, lora={"one": path}, **SMALL)
