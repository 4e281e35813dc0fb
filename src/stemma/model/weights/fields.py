"""Codes as files pack them, fields of some bits in blocks of bytes; taken apart where they are needed.

A byte for each code is twice what the file has: to write and read it, and to get the memory from the system,
took most of the time that a file needed to load. So a weight keeps its file's bytes, and the kernels take
them apart while they pack (native/blocks.h).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from stemma.native.library import loaded_kernels
from stemma.native.spreading import code_fields, spread
from stemma.native.structures import CodeFields


@dataclass(frozen=True, slots=True)
class Field:
    """Where a block's fields lie: of each run of `width` bytes come the lowest first, then the next."""

    at: int
    """The first byte within the block."""
    num_bytes: int
    """A multiple of `width`."""
    bits: int
    """Of a field: 1, 2, 4 or 8."""
    width: int
    """1, 16, 32 or 64 bytes."""

    @property
    def count(self) -> int:
        """How many fields a block has."""
        return self.num_bytes * 8 // self.bits


@dataclass(frozen=True, slots=True)
class PackedFields:
    """Codes [num_outputs, num_inputs] of which none lies outside what its bits can say."""

    blocks: torch.Tensor
    """uint8 [num_outputs, num_blocks, bytes of a block], contiguous."""
    low: Field
    high: Field | None = None
    """Bits above those of `low`; as many fields."""
    added: int = 0
    """What each code takes then."""

    def __post_init__(self) -> None:
        """Hold the parts against each other."""
        for field in (self.low, self.high or self.low):
            assert field.count == self.low.count
            assert field.at + field.num_bytes <= self.blocks.shape[2]
        assert self.blocks.dim() == 3
        assert self.blocks.dtype == torch.uint8
        assert self.blocks.is_contiguous()

    @property
    def shape(self) -> torch.Size:
        """[num_outputs, num_inputs]."""
        return torch.Size((self.blocks.shape[0], self.blocks.shape[1] * self.low.count))

    @property
    def nbytes(self) -> int:
        """Memory of the blocks."""
        return self.blocks.nbytes

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest code that there can be; of eight bits they are signed."""
        bits = self.low.bits + (0 if self.high is None else self.high.bits)
        return (-128, 127) if bits == 8 else (self.added, self.added + (1 << bits) - 1)

    def of_rows(self, chosen: slice | torch.Tensor) -> PackedFields:
        """Return those of some outputs."""
        return replace(self, blocks=self.blocks[chosen].contiguous())

    def apart(self) -> torch.Tensor:
        """Return a byte for each code, int8 [num_outputs, num_inputs]; by the kernels if they are loaded."""
        kernels, (low, *high) = loaded_kernels(), self._parts()
        if kernels is not None:
            places = self.places()
            codes = spread(kernels, low, places[0])
            for part, place in zip(high, places[1:], strict=True):
                spread(kernels, part, place, onto=codes)
            return codes.flatten(1)
        codes = fields_of(low, self.low.bits, self.low.width)
        if self.high is not None:
            codes |= fields_of(high[0], self.high.bits, self.high.width) << self.low.bits
        return codes.view(torch.int8).add_(self.added).flatten(1)

    def places(self) -> list[CodeFields]:
        """Return where the kernels find `low`, and `high` if there is one; valid as long as this object."""
        parts, low = self._parts(), self.low
        if self.high is None:
            return [code_fields(parts[0], low.bits, low.width, added=self.added)]
        high = code_fields(
            parts[1], self.high.bits, self.high.width, left=low.bits, added=self.added, joins=True
        )
        return [code_fields(parts[0], low.bits, low.width), high]

    def _parts(self) -> list[torch.Tensor]:
        fields = [self.low] if self.high is None else [self.low, self.high]
        return [self.blocks[..., field.at : field.at + field.num_bytes] for field in fields]


Codes: TypeAlias = torch.Tensor | PackedFields
"""Codes [num_outputs, num_inputs]: a byte for each, int8, or as their file packs them."""


def bytes_of(codes: Codes) -> torch.Tensor:
    """Return a byte for each code, int8 [num_outputs, num_inputs]."""
    return codes.apart() if isinstance(codes, PackedFields) else codes


def of_rows(codes: Codes, chosen: slice | torch.Tensor) -> Codes:
    """Return the codes of some outputs."""
    return codes.of_rows(chosen) if isinstance(codes, PackedFields) else codes[chosen]


def fields_of(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Return fields of `bits` bits of packed uint8 [rows, blocks, n], as [rows, blocks, n * 8 / bits].

    Of each run of `width` bytes come the lowest fields first, then the next.
    """
    runs = packed.reshape(*packed.shape[:2], -1, width)
    fields = runs.new_empty(*runs.shape[:3], 8 // bits, width)
    for number in range(8 // bits):
        torch.bitwise_and(runs >> bits * number, (1 << bits) - 1, out=fields[..., number, :])
    return fields.flatten(2)


def fields_of_words(words: torch.Tensor, bits: int) -> PackedFields:
    """Return the codes, less half of their range, of words int32 [outputs, n]; the lowest bits come first.

    `bits`: 4 or 8.
    """
    blocks = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return PackedFields(blocks, Field(0, 4, bits, 1), added=-(1 << (bits - 1)))
