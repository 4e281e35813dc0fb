"""Latent attention on CPU: always absorbed, with products whose rows don't depend on each other.

Absorbed and expanded attention round differently. A choice between them by the number of queries would make a
row's result depend on the chunk it came in, so every row is absorbed, prompts too.
"""

from __future__ import annotations

import torch

from stemma.model.attend.latent import LatentProjection
from stemma.model.cpu.weights import PackedProduct
from stemma.native.library import Kernels


class PackedLatent(LatentProjection):
    """A layer's `kv_b_proj` as two packed products a head."""

    def __init__(
        self, weight: torch.Tensor, *, nope_dim: int, rope_dim: int, value_dim: int, kernels: Kernels
    ) -> None:
        """Pack `kv_b_proj.weight`, [H * (nope + value), rank]; `can_pack_latent` says whether it can be."""
        self.rank, self.nope_dim, self.rope_dim, self.value_dim = (
            weight.shape[1],
            nope_dim,
            rope_dim,
            value_dim,
        )
        heads = weight.view(-1, nope_dim + value_dim, self.rank)
        self.absorbing = [PackedProduct(kernels, [head[:nope_dim].T]) for head in heads]
        """Of each head: what folds its query, [rank, nope]."""
        self.projecting = [PackedProduct(kernels, [head[nope_dim:]]) for head in heads]
        """Of each head: weighted latents to values, [value, rank]."""

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries [T, H, nope + rope] folded into latents [T, H, rank + rope]."""
        if query.stride(2) != 1:
            query = query.contiguous()
        folded = query.new_empty(*query.shape[:2], self.rank + self.rope_dim)
        folded[..., self.rank :] = query[..., self.nope_dim :]
        for head, product in enumerate(self.absorbing):
            product.into(query[:, head, : self.nope_dim], folded[:, head, : self.rank])
        return folded

    def project(self, output: torch.Tensor) -> torch.Tensor:
        """Return the values [T, H, value] of weighted latents [T, H, rank]."""
        values = output.new_empty(*output.shape[:2], self.value_dim)
        for head, product in enumerate(self.projecting):
            product.into(output[:, head], values[:, head])
        return values

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Never called: see the module's docstring."""
        raise AssertionError("latents on CPU are absorbed")
