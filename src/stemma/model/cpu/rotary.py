"""Cosines and sines of rotary embeddings, looked up by position.

A model's own module computes them anew in each step, in some ten torch calls: half a percent of a decode step
of a small model. They depend on the position alone (`loading.context_limit` sees to that where a model could
scale them by length), so they are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MAX_POSITIONS = 16_384
"""Positions that the tables reach to: 8 MB for heads of 128 in bfloat16. Beyond, angles are computed."""
_FIRST_POSITIONS = 1024


class PositionAngles:
    """cos and sin of positions, [T, head_dim] each, as `rotary` computes them in `dtype`."""

    def __init__(self, rotary: Any, dtype: torch.dtype) -> None:
        """`rotary`: the module of transformers, (x, positions [1, T]) -> cos, sin [1, T, head_dim]."""
        self._rotary = rotary
        self._like = torch.empty(0, dtype=dtype)
        self._cos = self._sin = torch.empty(0, 0, dtype=dtype)

    def at(self, positions: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of `positions` [T] int64, all below `num_positions`."""
        if num_positions > MAX_POSITIONS:
            return self._compute(positions)
        if num_positions > len(self._cos):
            reach = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            self._cos, self._sin = self._compute(torch.arange(reach))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def at_axes(
        self, positions: torch.Tensor, axes: Sequence[int], num_positions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, [T, head_dim], of `positions` [3, T] int64, all below `num_positions`.

        ``axes[i]`` says along which of the three the pair of dims number i turns.
        """
        cos, sin = self.at(positions[0], num_positions)
        column_of = torch.tensor(axes).repeat(2)  # both halves of a head have the same angles
        for axis in (1, 2):
            columns = column_of == axis
            own_cos, own_sin = self.at(positions[axis], num_positions)
            cos[:, columns], sin[:, columns] = own_cos[:, columns], own_sin[:, columns]
        return cos, sin

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(self._like, positions[None])
        return cos[0].contiguous(), sin[0].contiguous()


class RotaryHalves(PositionAngles):
    """The same, each pair of dims once: [T, rope_dim / 2] float32. A module may give complex numbers too."""

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = self._rotary(self._like, positions[None])
        if isinstance(angles, torch.Tensor):
            return angles[0].real.float().contiguous(), angles[0].imag.float().contiguous()
        half = angles[0].shape[-1] // 2
        cos, sin = (part[0, :, :half].float().contiguous() for part in angles)
        return cos, sin
