"""Packed experts equal plain ones at every level; a token's sum never depends on the others' routes."""

from __future__ import annotations

import pytest
import torch
from tests.native.isa import level_params
from transformers import DeepseekV3Config, PreTrainedConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from stemma.model.cpu.packing import Packing
from stemma.model.foreign.experts import pack_experts
from stemma.model.foreign.weights import ModuleWeights
from stemma.native.library import load_kernels

CASES = {
    "qwen3-moe": (Qwen3MoeExperts, Qwen3MoeConfig(hidden_size=72, moe_intermediate_size=40, num_experts=8)),
    "deepseek-v3": (
        DeepseekV3Experts,
        DeepseekV3Config(hidden_size=72, moe_intermediate_size=40, n_routed_experts=8),
    ),
}


@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_to_plain_and_alone(name: str, dtype: torch.dtype, isa: str) -> None:
    kind, config = CASES[name]
    assert isinstance(config, PreTrainedConfig)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = kind(config).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.1)
    cases = []
    for num_tokens in (1, 7, 40, 1100):
        hidden = torch.randn(num_tokens, 72).to(dtype)
        ids = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)])
        weights = torch.rand(num_tokens, 2)
        cases.append((hidden, ids, weights, module(hidden, ids, weights).detach()))
    kernels = load_kernels(isa)
    assert kernels is not None
    assert pack_experts(module, ModuleWeights(module, {}), Packing(kernels, dtype)) == 1
    assert not list(module.parameters())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    with torch.inference_mode():
        for hidden, ids, weights, expected in cases:
            output = module(hidden, ids, weights)
            assert (output - expected).norm() <= tolerance * expected.norm()
            for row in range(0, len(ids), 37):
                alone = module(hidden[row : row + 1], ids[row : row + 1], weights[row : row + 1])
                assert torch.equal(alone[0], output[row])
        assert module(hidden[:0], ids[:0], weights[:0]).shape == (0, 72)
        with pytest.raises(IndexError, match=r"outside 0\.\.7"):
            module(hidden[:1], torch.tensor([[0, 8]]), weights[:1])
