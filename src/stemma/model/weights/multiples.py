"""Numbers of a weight's groups as integers times a unit: GGUF's K-quants hold scales and minimums so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from stemma.errors import ModelError


@dataclass(frozen=True, slots=True)
class Multiples:
    """One number for each group of inputs: `integers * units`, exact in float32. Raises ModelError."""

    integers: torch.Tensor
    """int8 [num_outputs, num_groups]."""
    units: torch.Tensor
    """float32 [num_outputs, num_groups // n], shared by runs of n groups; n is a power of two."""

    def __post_init__(self) -> None:
        """Hold the parts against each other: they come from files."""
        each = self.integers.shape[1] // max(1, self.units.shape[1])
        fits = self.units.shape[0] == self.integers.shape[0] and self.integers.dtype == torch.int8
        if not fits or each * self.units.shape[1] != self.integers.shape[1] or each & (each - 1) or not each:
            raise ModelError(
                f"scales {list(self.integers.shape)} of a quantized weight have units "
                f"{list(self.units.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        """[num_outputs, num_groups]."""
        return self.integers.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return self.units.dtype

    @property
    def groups_of_unit(self) -> int:
        """How many groups share a unit."""
        return self.integers.shape[1] // self.units.shape[1]

    def numbers(self) -> torch.Tensor:
        """Return the numbers, float32 [num_outputs, num_groups]."""
        return self.integers * self.units.repeat_interleave(self.groups_of_unit, 1)

    def of_rows(self, chosen: slice | torch.Tensor) -> Multiples:
        """Return those of some outputs."""
        return Multiples(self.integers[chosen], self.units[chosen])

    def repeated(self, times: int) -> Multiples:
        """Return the numbers of groups that are so many times smaller."""
        return Multiples(self.integers.repeat_interleave(times, 1), self.units)


GroupNumbers: TypeAlias = torch.Tensor | Multiples
"""Scales or minimums, one for each group: float32 [num_outputs, num_groups], or integers times units."""


def numbers_of(values: GroupNumbers) -> torch.Tensor:
    """Return the numbers themselves, float32 [num_outputs, num_groups]."""
    return values.numbers() if isinstance(values, Multiples) else values


def rows_of(values: GroupNumbers, chosen: slice | torch.Tensor) -> GroupNumbers:
    """Return the numbers of some outputs."""
    return values.of_rows(chosen) if isinstance(values, Multiples) else values[chosen]


def repeated(values: GroupNumbers, times: int) -> GroupNumbers:
    """Return the numbers of groups that are so many times smaller."""
    if times == 1:
        return values
    return values.repeated(times) if isinstance(values, Multiples) else values.repeat_interleave(times, 1)


def alike(values: Sequence[GroupNumbers]) -> list[GroupNumbers]:
    """Return numbers all as multiples, or all plain unless each has units for as many groups."""
    multiples = [each for each in values if isinstance(each, Multiples)]
    if len(multiples) == len(values) and len({each.groups_of_unit for each in multiples}) == 1:
        return list(values)
    return [numbers_of(each) for each in values]


def below_each_other(values: Sequence[GroupNumbers]) -> GroupNumbers:
    """Return numbers that are `alike`, of outputs below each other."""
    multiples = [each for each in values if isinstance(each, Multiples)]
    if not multiples:
        return torch.cat([numbers_of(each) for each in values])
    integers, units = (
        torch.cat([getattr(each, name) for each in multiples]) for name in ("integers", "units")
    )
    return Multiples(integers, units)
