"""Mixtures of experts of transformers' modules, packed expert by expert (cpu/experts.py)."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from stemma.model.cpu.experts import PackedExperts
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weights import can_pack
from stemma.model.foreign.weights import ModuleWeights
from stemma.model.weights.named import Affine

_SILU = frozenset({"SiLU", "SiLUActivation"})


class GatedExperts:
    """Experts whose module has its own gate function, and maybe biases; they run one after the other."""

    def __init__(self, packing: Packing, module: Any) -> None:
        """Pack the experts of `module`, for which `has_own_gate` is true."""
        self._apply_gate = module._apply_gate
        self._products = [
            tuple(
                packing.tensor(
                    weight[expert].T if module.is_transposed else weight[expert],
                    bias[expert] if bias is not None else None,
                )
                for weight, bias in (
                    (module.gate_up_proj.detach(), getattr(module, "gate_up_proj_bias", None)),
                    (module.down_proj.detach(), getattr(module, "down_proj_bias", None)),
                )
            )
            for expert in range(module.gate_up_proj.shape[0])
        ]

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts: x [T, H], ids and weights [T, k]."""
        num_tokens, top_k = ids.shape
        experts, order = torch.sort(ids.reshape(-1), stable=True)
        routed, counts = torch.unique_consecutive(experts, return_counts=True)
        inputs = x[order // top_k]
        outputs = torch.empty_like(inputs)
        end = 0
        for expert, count in zip(routed.tolist(), counts.tolist(), strict=True):
            start, end = end, end + count
            gate_up, down = self._products[expert]
            outputs[start:end] = down(self._apply_gate(gate_up(inputs[start:end])))
        outputs *= weights.reshape(-1, 1)[order].to(outputs.dtype)
        by_token = torch.empty_like(outputs)
        by_token[order] = outputs
        return by_token.view(num_tokens, top_k, -1).sum(1)


def pack_experts(model: nn.Module, weights: ModuleWeights, packing: Packing) -> int:
    """Pack the experts of every layer that has a known form; return how many layers."""
    num_layers = 0
    modules: Iterable[Any] = list(model.modules())
    for module in modules:
        if has_common_form(module):
            module.stemma_experts = _common(module, weights, packing, module.gate_up_proj, module.down_proj)
        elif has_own_gate(module):
            module.stemma_experts = GatedExperts(packing, module)
        elif weighs_inputs(module):
            _pack_weighed_inputs(module, weights, packing)
            num_layers += 1
            continue
        else:
            continue
        del module.gate_up_proj, module.down_proj
        module.forward = MethodType(_forward, module)
        num_layers += 1
    return num_layers


def weighs_inputs(module: Any) -> bool:
    """Whether a module routes tokens to experts by weights of their inputs, as Llama 4 does.

    Its modules compute every expert for every token, with zeros for those that weren't chosen.
    """
    if type(module).__name__ != "Llama4TextMoe":
        return False
    experts, router = module.experts, module.router
    return (
        type(experts.act_fn).__name__ in _SILU
        and can_pack(experts.gate_up_proj[0].T)
        and can_pack(experts.down_proj[0].T)
        and 0 < router.top_k <= experts.num_experts
    )


def _pack_weighed_inputs(module: Any, weights: ModuleWeights, packing: Packing) -> None:
    """Pack gate_up_proj [E, H, 2 I] (gates, then ups) and down_proj [E, I, H]."""
    experts = module.experts
    stacked = experts.gate_up_proj.transpose(1, 2), experts.down_proj.transpose(1, 2)
    module.stemma_experts = _common(experts, weights, packing, *stacked)
    del experts.gate_up_proj, experts.down_proj
    module.forward = MethodType(_forward_weighed_inputs, module)


def _forward_weighed_inputs(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the forward of a module that weighs inputs: [..., H] -> [T, H] and the router's logits."""
    x = hidden_states.reshape(-1, module.hidden_dim)
    scores, router_logits = module.router(x)
    chosen, ids = scores.topk(module.top_k, dim=1)
    output = module.shared_expert(x)
    whole = torch.ones_like(chosen[:, :1])
    for place in range(module.top_k):
        output += module.stemma_experts(x * chosen[:, place, None], ids[:, place, None], whole)
    return output, router_logits


def _common(module: Any, weights: ModuleWeights, packing: Packing, gate_up: Any, down: Any) -> PackedExperts:
    """Pack the experts of `module`, gate_up [E, 2 I, H] (gates, then ups) and down [E, H, I]."""
    inner = down.shape[2]

    def part(name: str, stacked: Any) -> list[Affine]:
        return [Affine(weight) for weight in weights.experts(module, name, stacked)]

    gates, ups = part("gate_proj", gate_up[:, :inner]), part("up_proj", gate_up[:, inner:])
    return PackedExperts(packing, gates, ups, part("down_proj", down))


def has_common_form(module: Any) -> bool:
    """Whether a module is a set of experts that `PackedExperts` computes."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return (
        isinstance(gate_up, nn.Parameter)
        and isinstance(down, nn.Parameter)
        and gate_up.dim() == down.dim() == 3
        and 2 * down.shape[2] == gate_up.shape[1]
        and can_pack(gate_up[0])
        and can_pack(down[0])
        and getattr(getattr(module, "_apply_gate", None), "__name__", "") == "_default_apply_gate"
        and type(getattr(module, "act_fn", None)).__name__ in _SILU
        and getattr(module, "has_gate", False)
        and not any(
            getattr(module, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm")
        )
    )


def has_own_gate(module: Any) -> bool:
    """Whether a module is a set of experts that `GatedExperts` computes."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter)):
        return False
    if gate_up.dim() != 3 or down.dim() != 3 or not callable(getattr(module, "_apply_gate", None)):
        return False
    transposed = getattr(module, "is_transposed", False)
    return (
        all(can_pack(weight[0].T if transposed else weight[0]) for weight in (gate_up, down))
        and bool(getattr(module, "has_gate", False))
        and not getattr(module, "has_post_expert_norm", False)
    )


def _forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Replace the forward of an experts module: [T, H] routed by [T, k] ids and weights -> [T, H]."""
    output: torch.Tensor = module.stemma_experts(hidden_states, top_k_index, top_k_weights)
    return output
