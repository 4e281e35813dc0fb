"""Packed experts equal plain ones; experts that no token is routed to aren't touched."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, PreTrainedConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from stemma.model.cpu import experts
from stemma.model.cpu.experts import pack_experts
from stemma.model.cpu.weights import linear_function

CASES = {
    "qwen3-moe": (Qwen3MoeExperts, Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=8)),
    "deepseek-v3": (
        DeepseekV3Experts,
        DeepseekV3Config(hidden_size=64, moe_intermediate_size=32, n_routed_experts=8),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_equal_to_plain_and_only_routed_are_read(
    name: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, with plain products in place of packed ones: what is tested is the routing."""
    kind, config = CASES[name]
    assert isinstance(config, PreTrainedConfig)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = kind(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.1)
    hidden = torch.randn(num_tokens, 64)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 2)
    expected = module(hidden, ids, weights).detach()
    used: set[int] = set()

    def spy(weight, bias, *, pack):  # type: ignore[no-untyped-def]
        plain = linear_function(weight, bias, pack=False)
        number = spy.calls // 2  # type: ignore[attr-defined]
        spy.calls += 1  # type: ignore[attr-defined]

        def run(x: torch.Tensor) -> torch.Tensor:
            used.add(number)
            return plain(x)

        return run

    spy.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(experts, "linear_function", spy)
    assert pack_experts(module) == 1
    assert not list(module.parameters())
    with torch.inference_mode():
        torch.testing.assert_close(module(hidden, ids, weights), expected, atol=1e-5, rtol=1e-5)
    assert used == set(ids.flatten().tolist())
