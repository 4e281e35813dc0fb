"""Mixtures of experts on CPU: each expert's weights packed on their own, and only routed experts read.

transformers keeps all experts of a layer in two 3-D tensors. `pack_experts` turns them into one pair of
packed products an expert. A step sorts its (token, expert) pairs by expert, so each routed expert runs once
over all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from stemma.model.cpu.weights import LinearFunction, linear_function


def pack_experts(model: nn.Module) -> int:
    """Pack the experts of every layer that has the common form (gated, no bias); return how many layers."""
    num_layers = 0
    modules: Iterable[Any] = list(model.modules())
    for module in modules:
        if not _has_common_form(module):
            continue
        pairs: list[tuple[LinearFunction, LinearFunction]] = [
            (linear_function(gate_up, None, pack=True), linear_function(down, None, pack=True))
            for gate_up, down in zip(module.gate_up_proj, module.down_proj, strict=True)
        ]
        del module.gate_up_proj, module.down_proj
        module.stemma_experts = pairs
        module.forward = MethodType(_forward, module)
        num_layers += 1
    return num_layers


def _has_common_form(module: Any) -> bool:
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return (
        isinstance(gate_up, nn.Parameter)
        and isinstance(down, nn.Parameter)
        and gate_up.dim() == down.dim() == 3
        and callable(getattr(module, "_apply_gate", None))
        and getattr(module, "has_gate", False)
        and not any(
            getattr(module, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm")
        )
    )


def _forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Stand in for an experts module: [T, H] routed by [T, k] ids and weights -> [T, H]."""
    num_tokens, top_k = top_k_index.shape
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    routed, starts = np.unique(experts.numpy(), return_index=True)
    inputs = hidden_states[order // top_k]
    outputs = torch.empty_like(inputs)
    ends = [*starts[1:].tolist(), len(experts)]
    for expert, start, end in zip(routed.tolist(), starts.tolist(), ends, strict=True):
        gate_up, down = module.stemma_experts[expert]
        outputs[start:end] = down(module._apply_gate(gate_up(inputs[start:end])))
    outputs *= top_k_weights.reshape(-1, 1)[order].to(outputs.dtype)
    by_token = torch.empty_like(outputs)
    by_token[order] = outputs
    return by_token.view(num_tokens, top_k, -1).sum(1)
