"""Mixtures of experts on CPU: each expert's weights packed on their own, and only routed experts read.

A step sorts its (token, expert) pairs by expert, so each routed expert runs once over all its tokens
(native/mixture.h), within the one call of a whole step or for a module of transformers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from stemma.model.cpu.packing import Packing
from stemma.model.families.layout import Clamped
from stemma.model.weights.named import Affine
from stemma.native.structures import GatedWeights, MixtureArgs


class PackedExperts:
    """The experts of one layer."""

    def __init__(
        self,
        packing: Packing,
        gates: Sequence[Affine],
        ups: Sequence[Affine],
        downs: Sequence[Affine],
        clamped: Clamped | None = None,
    ) -> None:
        """Pack each expert's weights: gate and up [I, H], down [H, I], all with a bias or none.

        `clamped`: their activation instead of silu.
        """
        activation = (0.0, 0.0) if clamped is None else (clamped.sharpness, clamped.limit)
        self._kernels = packing.kernels
        self._products = packing.experts(gates, ups, downs)
        self.num_experts = len(self._products)
        self.weights = (GatedWeights * self.num_experts)(
            *(GatedWeights(*(product.strips for product in expert), *activation) for expert in self._products)
        )
        """Where the kernels find them; valid as long as this object."""

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Add up each token's experts: x [T, H], routed by [T, k] ids and weights -> [T, H]."""
        rows, top_k = ids.shape
        if rows == 0:
            return torch.empty_like(x)
        x, ids, weights = x.contiguous(), ids.to(torch.int32).contiguous(), weights.float().contiguous()
        if ids.amin() < 0 or ids.amax() >= self.num_experts:
            raise IndexError(f"tokens are routed to experts outside 0..{self.num_experts - 1}")
        output = torch.empty_like(x)
        args = MixtureArgs(
            experts=ctypes.addressof(self.weights),
            num_experts=self.num_experts,
            top_k=top_k,
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            output=output.data_ptr(),
            rows=rows,
            is_bf16=x.dtype == torch.bfloat16,
            threads=torch.get_num_threads(),
        )
        at = ctypes.addressof(args)
        room = torch.empty(self._kernels.mixture_room(at) + 64, dtype=torch.uint8)
        args.room = -(-room.data_ptr() // 64) * 64
        self._kernels.mixture(at)
        return output
