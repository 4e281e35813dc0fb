"""Fields of packed codes, taken apart by the kernels (blocks.h)."""

from __future__ import annotations

import ctypes

import torch

from stemma.native.library import Kernels
from stemma.native.structures import CodeFields, SpreadArgs


def code_fields(
    packed: torch.Tensor, bits: int, width: int, *, left: int = 0, added: int = 0, joins: bool = False
) -> CodeFields:
    """Return where packed uint8 [rows, blocks, n] holds fields of `bits` bits; valid as long as it is.

    Of each run of `width` bytes (1, 16, 32 or 64) come the lowest fields first, then the next. A field is
    moved `left` bits up, joined with the codes that are there (`joins`), and each code takes `added`.
    `packed`: some bytes of blocks that lie behind each other.
    """
    _, blocks, num_bytes = packed.shape
    assert packed.stride() == (blocks * packed.stride(1), packed.stride(1), 1), "blocks lie apart"
    return CodeFields(packed.data_ptr(), packed.stride(1), num_bytes, bits, width, left, added, joins)


def spread(
    kernels: Kernels, packed: torch.Tensor, fields: CodeFields, onto: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the `fields` of packed uint8 [rows, blocks, n] as int8 [rows, blocks, n * 8 / bits].

    `onto`: the codes that they are joined with, which then are what's returned.
    """
    rows, blocks, num_bytes = packed.shape
    codes = onto
    if codes is None:
        codes = torch.empty(rows, blocks, num_bytes * 8 // fields.bits, dtype=torch.int8)
    args = SpreadArgs(fields, codes.data_ptr(), rows * blocks, torch.get_num_threads())
    kernels.spread(ctypes.addressof(args))
    return codes
