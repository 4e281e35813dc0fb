"""Latent attention on CPU: always absorbed, with products whose rows don't depend on each other.

Absorbed and expanded attention round differently. A choice between them by the number of queries would make a
row's result depend on the chunk it came in, so every row is absorbed, prompts too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stemma.model.cpu.weights import PackedProduct, can_pack
from stemma.model.latent import LatentProjection
from stemma.native.library import Kernels


class PackedLatent(LatentProjection):
    """A layer's `kv_b_proj` as two packed products a head."""

    def __init__(self, plain: LatentProjection, kernels: Kernels) -> None:
        """Pack `plain`, which the caller then drops; `can_pack_latent` says whether it can be."""
        self.rank, self.nope_dim = plain.rank, plain.nope_dim
        self.rope_dim, self.value_dim = plain.rope_dim, plain.value_dim
        self.absorbing = [PackedProduct(kernels, [head[: plain.nope_dim].T]) for head in plain.weight]
        """Of each head: what folds its query, [rank, nope]."""
        self.projecting = [PackedProduct(kernels, [head[plain.nope_dim :]]) for head in plain.weight]
        """Of each head: weighted latents to values, [value, rank]."""

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """See `LatentProjection.absorb`."""
        if query.stride(2) != 1:
            query = query.contiguous()
        folded = query.new_empty(*query.shape[:2], self.rank + self.rope_dim)
        folded[..., self.rank :] = query[..., self.nope_dim :]
        for head, product in enumerate(self.absorbing):
            product.into(query[:, head, : self.nope_dim], folded[:, head, : self.rank])
        return folded

    def project(self, output: torch.Tensor) -> torch.Tensor:
        """See `LatentProjection.project`."""
        values = output.new_empty(*output.shape[:2], self.value_dim)
        for head, product in enumerate(self.projecting):
            product.into(output[:, head], values[:, head])
        return values

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Never called: see the module's docstring."""
        raise AssertionError("latents on CPU are absorbed")


def pack_latents(model: nn.Module, kernels: Kernels) -> None:
    """Pack the latent projections of all layers and drop the plain weights."""
    modules: Any = list(model.modules())
    for module in modules:
        plain = getattr(module, "stemma_latent", None)
        if plain is None or not can_pack_latent(plain):
            continue
        module.stemma_latent = PackedLatent(plain, kernels)
        module.kv_b_proj = nn.Identity()


def can_pack_latent(plain: LatentProjection) -> bool:
    """Whether both products of a head can be packed."""
    head = plain.weight[0]
    return can_pack(head[: plain.nope_dim].T) and can_pack(head[plain.nope_dim :])
