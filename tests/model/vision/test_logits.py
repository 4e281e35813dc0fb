"""Answers about images equal those of transformers, whose generate gets the same pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from stemma.engine.llm import LLM
from stemma.engine.offline import Generation
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import UnsupportedModel
from stemma.native.library import load_kernels
from tests.model.vision.processors import processor_of
from tests.vision_checkpoints import VISION_FAMILIES, make_vision_checkpoint, picture

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

TOLERANCES = {"float32": 1e-4, "bfloat16": 6e-2}
CLASSES = {
    "smolvlm": "SmolVLMForConditionalGeneration",
    "qwen2.5-vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3-vl": "Qwen3VLForConditionalGeneration",
    "qwen3-vl-moe": "Qwen3VLMoeForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
}
NUM_NEW = 12


def asked() -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": picture(1, 200, 100)},
                {"type": "text", "text": "What is this?"},
                {"type": "image", "image": picture(2, 60, 90)},
                {"type": "text", "text": "And then?"},
            ],
        }
    ]


def answered(path: Path, dtype: str, chat: list[dict[str, Any]]) -> Generation:
    llm = LLM(path, dtype=dtype, device="cpu", kv_cache_memory="8MB", block_size=16, max_batch_tokens=50)
    try:
        params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
        return llm.chat(chat, params)[0]
    finally:
        llm.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_like_transformers(family: str, dtype: str, vision_path: Path) -> None:
    found = answered(vision_path, dtype, asked())
    processor = processor_of(family, vision_path)
    inputs: Any = processor.apply_chat_template(
        asked(), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    model: Any = getattr(transformers, CLASSES[family]).from_pretrained(
        vision_path, dtype=getattr(torch, dtype)
    )
    ids = inputs["input_ids"]
    assert found.prompt_token_ids.tolist() == ids[0].tolist()
    with torch.inference_mode():
        logprobs = model(**inputs).logits[0].float().log_softmax(-1)
        expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        generated = model.generate(**inputs, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False)[
            0, ids.shape[1] :
        ].tolist()
    assert found.prompt_logprobs is not None
    assert np.abs(found.prompt_logprobs.logprobs - expected).max() < TOLERANCES[dtype]
    if dtype == "float32":
        assert found.completions[0].token_ids == generated


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_text_alone_is_as_without_images(family: str, vision_path: Path) -> None:
    found = answered(vision_path, "float32", [{"role": "user", "content": "What is a harbour?"}])
    model: Any = getattr(transformers, CLASSES[family]).from_pretrained(vision_path, dtype=torch.float32)
    ids = torch.from_numpy(found.prompt_token_ids.astype(np.int64))[None]
    with torch.inference_mode():
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    assert found.prompt_logprobs is not None
    assert np.abs(found.prompt_logprobs.logprobs - expected).max() < TOLERANCES["float32"]


def test_too_many_experts_are_refused_before_any_is_made(tmp_path: Path) -> None:
    """They are pieces of few tensors, so that the tensors don't bound their number."""
    path = make_vision_checkpoint("qwen3-vl-moe", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {"num_experts": 5000, "num_local_experts": 5000}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="counts 5000 experts; served are 1024"):
        LLM(path, device="cpu", kv_cache_memory="8MB")
