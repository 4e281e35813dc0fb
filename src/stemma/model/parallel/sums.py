"""Layers whose results are partial sums: each is followed by the addition over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stemma.model.families.cuts import Cuts
from stemma.model.parallel.group import RankGroup
from stemma.model.parallel.share import num_experts_of


class SummedLinear(nn.Module):
    """A row-parallel layer."""

    def __init__(self, inner: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.inner = inner
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., this rank's inputs] -> [..., out_features], the same on every rank."""
        return self._group.add(self.inner(x))


class SummedExperts(nn.Module):
    """The experts of a layer: those of this rank compute, the results of all ranks are added."""

    def __init__(self, inner: nn.Module, group: RankGroup, num_experts: int) -> None:
        """`num_experts`: of all ranks."""
        super().__init__()
        self.inner = inner
        self._group = group
        self._own = group.share.experts(num_experts)
        self._holds_all = len(self._own) == num_experts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] routed by [T, k] ids and weights -> [T, H]."""
        if self._holds_all:
            return self._group.add(self.inner(hidden_states, top_k_index, top_k_weights))
        return self._group.add(self._partial(hidden_states, top_k_index, top_k_weights)).to(
            hidden_states.dtype
        )

    def _partial(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Add up what this rank's experts give, pair by pair of token and expert, [T, H] float32."""
        is_own = (ids >= self._own.start) & (ids < self._own.stop)
        tokens, places = is_own.nonzero(as_tuple=True)
        by_place = torch.zeros(ids.shape[1], *x.shape, dtype=torch.float32, device=x.device)
        if len(tokens):
            chosen = (ids[tokens, places] - self._own.start)[:, None]
            outputs = self.inner(x[tokens], chosen, weights[tokens, places][:, None])
            by_place[places, tokens] = outputs.float()
        total = by_place[0]
        for part in by_place[1:]:  # one place after the other: a row's sum depends on nothing beside it
            total += part
        return total


class RankedNorm(nn.Module):
    """An RMS norm of numbers that lie on all ranks, gated or not."""

    def __init__(self, inner: Any, group: RankGroup) -> None:
        super().__init__()
        self.weight = inner.weight
        self._eps = inner.variance_epsilon
        self._group = group

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Norm [..., this rank's numbers] with all ranks' numbers; multiplied by silu of gates, if given."""
        gated = hidden_states.float()
        if gate is not None:
            gated = gated * F.silu(gate.float())
        squares = self._group.add(gated.pow(2).sum(-1, keepdim=True))
        variance = squares / (gated.shape[-1] * self._group.share.size)
        normed = gated * torch.rsqrt(variance + self._eps)
        scaled: torch.Tensor = self.weight * normed.to(hidden_states.dtype)
        return scaled


def add_sums(model: nn.Module, group: RankGroup, cuts: Cuts) -> None:
    """Put the additions into a model that holds the rank's share."""
    whole: Any = model
    num_experts = num_experts_of(whole.config.get_text_config())
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and cuts.divides_inputs(f"{path}.{name}"):
                setattr(parent, name, SummedLinear(child, group))
            elif name == "experts" and hasattr(child, "down_proj"):
                setattr(parent, name, SummedExperts(child, group, num_experts))
            elif cuts.has_ranked_norm(f"{path}.{name}"):
                setattr(parent, name, RankedNorm(child, group))
