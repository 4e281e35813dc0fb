"""A checkpoint's weights as a decoder takes them: by name, of the model's dtype, finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from stemma.model.families.layout import Linear, Norm, Piece
from stemma.model.weights.quantized import QuantizedWeight
from stemma.model.weights.stored import CodedFloats, StoredWeights

Weight: TypeAlias = torch.Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True)
class Affine:
    """The weight of a linear layer, and its bias."""

    weight: Weight
    """[num_outputs, num_inputs]."""
    bias: torch.Tensor | None = None
    """[num_outputs]."""


class NamedWeights:
    """Reads weights when they are asked for; nothing is kept."""

    def __init__(
        self,
        stored: Mapping[str, Weight],
        dtype: torch.dtype,
        check: Callable[[str, torch.Tensor], None],
    ) -> None:
        """`check` takes the name and the numbers of each plain tensor, and raises if they can't be served."""
        self._stored, self._dtype, self._check = stored, dtype, check

    def affine(self, linear: Linear) -> Affine:
        """Return what a linear layer computes with; its weight may be quantized."""
        weight = self._stored[linear.weight]
        if (piece := linear.piece) is not None:
            weight = _rows_of(weight, piece, linear.outputs)
        if isinstance(weight, torch.Tensor):
            weight = self._plain(linear.weight, weight)
        return Affine(weight, self.bias(linear))

    def coded(self, linear: Linear) -> CodedFloats | None:
        """Return a linear layer's weight as codes of FP8; None: the checkpoint has none."""
        stored = self._stored
        coded = stored.coded(linear.weight) if isinstance(stored, StoredWeights) else None
        if coded is None:
            return None
        if (piece := linear.piece) is not None:
            coded = coded.rows(_chosen(piece, linear.outputs))
        self._check(linear.weight, coded.plain())
        return coded

    def codes(self, name: str) -> QuantizedWeight | None:
        """Return a weight if it is quantized; None: it is plain."""
        stored = self._stored
        found = stored[name] if isinstance(stored, StoredWeights) and name in stored.deferred() else None
        return found if isinstance(found, QuantizedWeight) else None

    def norm(self, norm: Norm) -> torch.Tensor:
        """Return a norm's weight [size], apart from its file, and whole if it is centered."""
        name = f"{norm.name}.weight"
        if norm.in_floats:
            return self.floats(name) + (1.0 if norm.is_centered else 0.0)
        return self.own(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a weight's numbers, dequantized if it is quantized."""
        weight = self._stored[name]
        if isinstance(weight, torch.Tensor):
            return self._plain(name, weight)
        return weight.dequantize(self._dtype)

    def own(self, name: str) -> torch.Tensor:
        """Return a weight's numbers as `tensor` does, apart from its file."""
        found = self.tensor(name)
        return found if isinstance(self._stored, StoredWeights) and self._stored.in_memory else found.clone()

    def floats(self, name: str) -> torch.Tensor:
        """Return a plain tensor as it is stored, in float32."""
        weight = self._stored[name]
        assert isinstance(weight, torch.Tensor)
        self._check(name, weight)
        return weight.float().contiguous()

    def bias(self, linear: Linear) -> torch.Tensor | None:
        """Return a linear layer's bias [num_outputs]; None: it has none."""
        if (bias := linear.bias) is not None:
            stacked, piece = self.tensor(bias.name), bias.piece
            return stacked[piece.expert][_chosen(piece, linear.outputs)].contiguous()
        return self.tensor(f"{linear.name}.bias") if linear.has_bias else None

    def _plain(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.to(self._dtype)
        self._check(name, weight)
        return weight


def _rows_of(weight: Weight, piece: Piece, count: int) -> Weight:
    chosen = _chosen(piece, count)
    if not isinstance(weight, torch.Tensor):
        return weight.rows(chosen.start, chosen.stop)
    rows = weight if piece.expert is None else weight[piece.expert]
    return rows[:, chosen].T.contiguous() if piece.is_transposed else rows[chosen]


def _chosen(piece: Piece, count: int) -> slice:
    return slice(piece.first_row, piece.first_row + count * piece.step, piece.step)
