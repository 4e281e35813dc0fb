"""Fields of packed codes, taken apart by the kernels (blocks.h)."""

from __future__ import annotations

import ctypes

import torch

from stemma.native.library import Kernels
from stemma.native.structures import SpreadArgs


def spread(
    kernels: Kernels,
    packed: torch.Tensor,
    bits: int,
    width: int,
    *,
    left: int = 0,
    added: int = 0,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return fields of `bits` bits of packed uint8 [rows, blocks, n] as int8 [rows, blocks, n * 8 / bits].

    Of each run of `width` bytes (16, 32 or 64) come the lowest fields first, then the next. A field is moved
    `left` bits up and joined with the codes in `onto`, which then is what's returned; each takes `added`.
    `packed`: some bytes of blocks that lie behind each other.
    """
    rows, blocks, num_bytes = packed.shape
    assert packed.stride() == (blocks * packed.stride(1), packed.stride(1), 1), "blocks lie apart"
    codes = onto
    if codes is None:
        codes = torch.empty(rows, blocks, num_bytes * 8 // bits, dtype=torch.int8)
    args = SpreadArgs(
        packed.data_ptr(),
        codes.data_ptr(),
        rows * blocks,
        packed.stride(1),
        *(num_bytes, bits, width, left, added, onto is not None),
        torch.get_num_threads(),
    )
    kernels.spread(ctypes.addressof(args))
    return codes
