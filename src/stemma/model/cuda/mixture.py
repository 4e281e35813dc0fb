"""Mixtures of experts on a device: products of the routed experts alone, in one launch each.

Which expert has how many tokens is known on the device only. So a launch has as many programs as there may be
tiles, and those that find none end at once: one recording serves any routing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from stemma.model.cuda.layer_kernels import combine, route
from stemma.model.cuda.layers import GatedMLP, LayerStep, OnDevice, gate_of
from stemma.model.cuda.products import ROUND, Chosen, CodedWeight, Gate, Sums, Weight
from stemma.model.families import layout


class ExpertMLP:
    """Experts behind a router."""

    def __init__(self, number: int, mixture: layout.Mixture, load: OnDevice) -> None:
        self._router = mixture.router
        self._logits = _router_product(mixture.router, load)
        self._correction = None
        if mixture.router.correction is not None:
            self._correction = load.floats(mixture.router.correction)
        experts = mixture.experts
        self._gate_up = _stacked([load.linears(e.gate, e.up) for e in experts], gate_of(experts[0]))
        self._down = _stacked([load.linears(expert.down) for expert in experts])
        self._shared = None if mixture.shared is None else GatedMLP(number, mixture.shared, load)
        self._shared_gate = None
        if mixture.shared_gate is not None:
            self._shared_gate = load.floats(mixture.shared_gate.weight).flatten()

    def __call__(self, x: torch.Tensor, step: LayerStep) -> Sums:
        """Take normed states [T, H]."""
        top_k, num_experts = self._router.top_k, self._router.linear.outputs
        ids, weights = self._route(x)
        sorted_ids, order = ids.flatten().sort(stable=True)
        starts = torch.searchsorted(
            sorted_ids, torch.arange(num_experts + 1, dtype=sorted_ids.dtype, device=x.device)
        )
        inner = self._gate_up.by_expert(x, Chosen(order, starts, top_k))
        outputs = self._down.by_expert(inner, Chosen(order, starts, 1))
        shared = None if self._shared is None else self._shared(x, step)
        return self._combine(x, outputs, weights, shared)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts and their weights, [T, k] int32 and float32."""
        router, sums, num_tokens = self._router, self._logits(x), x.shape[0]
        ids = torch.empty(num_tokens, router.top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(num_tokens, router.top_k, dtype=torch.float32, device=x.device)
        kernel: Any = route[(num_tokens,)]
        kernel(
            *sums.arguments(),
            weights if self._correction is None else self._correction,
            ids,
            weights,
            num_tokens * router.linear.outputs,
            router.scale,
            **sums.constants(),
            ROUND=ROUND[sums.dtype],
            EXPERTS=router.linear.outputs,
            PADDED=triton.next_power_of_2(router.linear.outputs),
            TOP_K=router.top_k,
            CHOICES=triton.next_power_of_2(router.top_k),
            BY=int(router.by),
            NORMALIZES=router.normalize,
            HAS_CORRECTION=self._correction is not None,
            NUM_GROUPS=router.num_groups,
            TOP_GROUPS=router.top_groups,
            GROUPS=triton.next_power_of_2(max(1, router.num_groups)),
            ROUND_WEIGHTS=ROUND[x.dtype],
            num_warps=1,
        )
        return ids, weights

    def _combine(
        self, x: torch.Tensor, outputs: torch.Tensor, weights: torch.Tensor, shared: Sums | None
    ) -> Sums:
        mixed = torch.empty_like(x)
        kernel: Any = combine[(x.shape[0],)]
        kernel(
            outputs,
            weights,
            x,
            *((outputs, outputs) if shared is None else shared.arguments()),
            weights if self._shared_gate is None else self._shared_gate,
            mixed,
            x.numel(),
            x.shape[1],
            **({"PIECES": 1, "HAS_BIAS": False} if shared is None else shared.constants()),
            TOP_K=self._router.top_k,
            HAS_SHARED=shared is not None,
            HAS_GATE=self._shared_gate is not None,
            BLOCK=triton.next_power_of_2(x.shape[1]),
        )
        return Sums(mixed, 1, None, x.dtype)


def _router_product(router: layout.ExpertRouter, load: OnDevice) -> Weight:
    """Return the product to experts' logits, in float32 unless the family rounds them."""
    weight = load.tensor(router.linear.weight)
    bias = load.tensor(f"{router.linear.name}.bias") if router.linear.has_bias else None
    if router.by != layout.RoutedBy.ROUNDED_SOFTMAX:
        weight, bias = weight.float(), None if bias is None else bias.float()
    return Weight(weight, bias)


def _stacked(
    linears: list[tuple[torch.Tensor | CodedWeight, torch.Tensor | None]], gate: Gate | None = None
) -> Weight:
    """Return a product with one of several experts' weights; with a `gate` they are gates above ups."""
    biases = [bias for _, bias in linears if bias is not None]
    codes = [weight for weight, _ in linears if isinstance(weight, CodedWeight)]
    plain = [weight for weight, _ in linears if isinstance(weight, torch.Tensor)]
    stacked = CodedWeight.stacked(codes) if codes else torch.stack(plain)
    return Weight(stacked, torch.stack(biases) if biases else None, gate)
