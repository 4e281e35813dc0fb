"""Latent attention on a device, absorbed for any number of queries: no context is ever expanded.

Both ways round differently, so a choice by the number of rows would show in the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.latent import LatentProjection
from stemma.model.cuda.layer_kernels import prepare_latents
from stemma.model.cuda.layers import LayerStep, OnDevice
from stemma.model.cuda.low_rank import EXPAND, INPUTS
from stemma.model.cuda.products import Weight
from stemma.model.families import layout


class _Absorbed(LatentProjection):
    """What attention asks of a layer whose queries are over latents already."""

    def __init__(self, rank: int) -> None:
        self.rank = self.value_dim = rank
        self.max_absorbed_queries = 1 << 30

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return the query."""
        return query

    def project(self, output: torch.Tensor) -> torch.Tensor:
        """Return weighted latents as they are."""
        return output


class LatentAttention:
    """All heads over one latent and one rotary key."""

    def __init__(
        self,
        number: int,
        layer: layout.Layer,
        heads: layout.LatentHeads,
        angles: torch.Tensor,
        load: OnDevice,
    ) -> None:
        """`angles`: see `angle_table`."""
        latent = layer.latent
        assert latent is not None
        self._heads, self._angles = heads, angles
        self._joined = load.product(*layer.inputs)
        self._norm = load.norm(latent.norm)
        self._query_norm = None if latent.query_norm is None else load.norm(latent.query_norm)
        self._expand = None if latent.expand is None else load.product(latent.expand)
        projection = load.tensor(latent.projection.weight)
        projection = projection.view(heads.num_heads, heads.nope_dim + heads.value_dim, heads.rank)
        self._fold = Weight(projection[:, : heads.nope_dim].transpose(1, 2))
        self._project = Weight(projection[:, heads.nope_dim :])
        self._call = AttentionCall(number, layer.scaling, layer.window, None, _Absorbed(heads.rank))

    def __call__(self, normed: torch.Tensor, positions: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Attend."""
        shape, number = self._heads, self._call.layer_idx
        joined = step.adapted(number, INPUTS, normed, self._joined(normed)).join()
        latent = joined[:, joined.shape[1] - shape.rank - shape.rope_dim :]
        query = joined
        if self._expand is not None and self._query_norm is not None:
            columns = self._query_norm.columns(joined)
            query = step.adapted(number, EXPAND, columns, self._expand(columns)).join()
        folded = self._prepare(query, latent, positions, step)
        heads = query[:, : shape.num_heads * (shape.nope_dim + shape.rope_dim)]
        heads = heads.view(len(normed), shape.num_heads, -1)
        self._fold.by_group(heads, folded)
        weighted = step.reader.read(self._call, folded)
        values = torch.empty(
            *(len(normed), shape.num_heads, shape.value_dim), dtype=normed.dtype, device=normed.device
        )
        self._project.by_group(weighted, values)
        return values.flatten(1)

    def _prepare(
        self, query: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, step: LayerStep
    ) -> torch.Tensor:
        """Write latents to the cache; return queries with their rotary parts alone, [T, H, rank + rope]."""
        slots, cache = step.place(self._call.layer_idx)
        shape, num_tokens = self._heads, len(query)
        folded = query.new_empty(num_tokens, shape.num_heads, shape.rank + shape.rope_dim)
        kernel: Any = prepare_latents[(num_tokens, shape.num_heads + 1)]
        kernel(
            query,
            latent,
            self._norm.weight,
            self._angles,
            positions,
            slots,
            folded,
            cache,
            query.stride(0),
            latent.stride(0),
            shape.num_heads,
            self._angles.shape[1],
            self._norm.eps,
            cache.stride(0),
            cache.stride(2),
            BLOCK_SIZE=cache.shape[2],
            RANK=shape.rank,
            NOPE=shape.nope_dim,
            ROPE=shape.rope_dim,
            PAIRED=shape.rotation != layout.Rotation.HALVES,
            LEAVES_PAIRS=shape.rotation == layout.Rotation.PAIRS,
            BLOCK=triton.next_power_of_2(shape.rank),
            HALF=triton.next_power_of_2(shape.rope_dim // 2),
            **step.stored(),
            num_warps=1,
        )
        return folded
