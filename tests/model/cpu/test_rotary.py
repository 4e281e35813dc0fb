"""Angles that were computed once are those that the model's own module computes in a step, to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stemma.model.cpu.rotary import MAX_POSITIONS, PositionAngles

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_module_at_any_position(kind: str, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=32_768, rope_parameters=ROPES[kind]
    )
    module = LlamaRotaryEmbedding(config)
    angles = PositionAngles(module, dtype)
    generator = torch.Generator().manual_seed(0)
    for reach in (1, 700, 1024, 1025, 5000, MAX_POSITIONS, 30_000):
        for count in (1, 3, 8, 33):
            positions = torch.randint(0, reach, (count,), generator=generator)
            positions[-1] = reach - 1
            cos, sin = module(torch.empty(0, dtype=dtype), positions[None])
            ours = angles.at(positions, reach)
            assert all(one.is_contiguous() for one in ours)
            assert torch.equal(ours[0], cos[0])
            assert torch.equal(ours[1], sin[0])
