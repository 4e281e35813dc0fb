"""Weights of transformers as they lie in a GGUF file: a tensor, an expert of one, or several joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from stemma.errors import ModelError
from stemma.model.families.gguf_changes import Change
from stemma.model.files.gguf_header import GGUFHeader, GGUFTensor
from stemma.model.formats.gguf.tensors import is_kept, raw_data, split, widen
from stemma.model.weights.fields import bytes_of
from stemma.model.weights.joining import alike, below_each_other
from stemma.model.weights.multiples import numbers_of
from stemma.model.weights.quantized import QuantizedWeight

_GROUP = 32
"""Columns that share a scale at most, in types that stay quantized."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One tensor, or one expert of those that it stacks."""

    header: GGUFHeader
    tensor: GGUFTensor
    expert: int | None
    change: Change

    def check(self) -> None:
        """Raise ModelError if the tensor hasn't the dimensions, rows and columns that the change is for."""
        shape, change = self.shape, self.change
        self.check_dimensions(change.dimensions)
        for wanted, size, what in ((change.rows, shape[0], "rows"), (change.columns, shape[-1], "columns")):
            if wanted is not None and len(wanted) != size:
                raise ModelError(
                    f"{self.header.path}: {self.tensor.name} has {size} {what}, its metadata make "
                    f"{len(wanted)}"
                )

    def check_dimensions(self, count: int | None) -> None:
        """Raise ModelError unless the tensor has so many; None: any number will do."""
        if count is not None and len(self.shape) != count:
            raise ModelError(
                f"{self.header.path}: {self.tensor.name} of shape {list(self.shape)} must have {count} "
                "dimensions; download it again"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file has it."""
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def may_be_codes(self) -> bool:
        """Whether it is a matrix that can stay quantized."""
        change = self.change
        is_changed = change.numbers is not None or change.layout is not None
        if len(self.shape) != 2 or is_changed or not is_kept(self.tensor.type):
            return False
        return change.columns is None or _moves_groups(change.columns)

    def codes(self) -> QuantizedWeight:
        """Return it as codes. Raises ModelError if the file is damaged."""
        data = raw_data(self.tensor, self.expert)
        if self.change.rows is not None:
            data = data[list(self.change.rows)]
        with self._named():
            weight = split(data, self.tensor.type)
        return weight if self.change.columns is None else _with_columns(weight, self.change.columns)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Return it as numbers of `dtype`; in float32 if they were changed. Raises ModelError."""
        change = self.change
        with self._named():
            data = raw_data(self.tensor, self.expert)
            found = widen(data, self.tensor.type, dtype if change.numbers is None else torch.float32)
        if change.rows is not None:
            found = found[list(change.rows)]
        if change.columns is not None:
            found = found[:, list(change.columns)]
        for make in (change.numbers, change.layout):
            found = found if make is None else make(found)
        return found

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let errors say which tensor they are about."""
        try:
            yield
        except ModelError as error:
            raise ModelError(f"{self.header.path}: {self.tensor.name}: {error}") from error


@dataclass(frozen=True, slots=True)
class Whole:
    """A weight of transformers."""

    pieces: tuple[TensorPiece, ...]
    rows: Sequence[int] | None = None
    """Where each row is, of all pieces' rows below each other; None: in order."""
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    """Joins plain tensors in another way; the weight then never stays quantized."""

    @property
    def shape(self) -> torch.Size:
        """The shape of its codes: rows below each other."""
        return torch.Size((sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:]))

    @property
    def may_be_codes(self) -> bool:
        """Whether it can stay quantized."""
        same_columns = len({piece.shape[1:] for piece in self.pieces}) == 1
        return self.join is None and same_columns and all(piece.may_be_codes for piece in self.pieces)

    def codes(self) -> QuantizedWeight:
        """Return it as codes. Raises ModelError if the file is damaged."""
        weights = [piece.codes() for piece in self.pieces]
        if len(weights) == 1 and self.rows is None:
            return weights[0]
        order = torch.arange(self.shape[0]) if self.rows is None else torch.tensor(self.rows)
        return below_each_other(alike(weights), order)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Return it as numbers. Raises ModelError."""
        parts = [piece.plain(dtype) for piece in self.pieces]
        if len({part.shape[1:] for part in parts}) > 1 or (self.join and len({p.shape for p in parts}) > 1):
            names = ", ".join(piece.tensor.name for piece in self.pieces)
            raise ModelError(f"{self.pieces[0].header.path}: {names} have shapes that don't fit each other")
        if self.join is not None:
            return self.join(parts)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole if self.rows is None else whole[list(self.rows)]


def _moves_groups(columns: Sequence[int]) -> bool:
    """Whether columns that share a scale stay together."""
    if len(columns) % _GROUP:
        return False
    groups = torch.tensor(columns).view(-1, _GROUP)
    first = groups[:, :1]
    return bool((first % _GROUP == 0).all()) and torch.equal(groups, first + torch.arange(_GROUP))


def _with_columns(weight: QuantizedWeight, columns: Sequence[int]) -> QuantizedWeight:
    """Return codes with columns in another order, in which groups stay together."""
    order = torch.tensor(columns)
    groups = order[:: weight.group_size] // weight.group_size
    offsets = weight.offsets()
    return replace(
        weight,
        codes=bytes_of(weight.codes)[:, order].contiguous(),
        scales=numbers_of(weight.scales)[:, groups].contiguous(),
        minimums=None if offsets is None else offsets[:, groups].contiguous(),
    )
