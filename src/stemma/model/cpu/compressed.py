"""Plain bf16 weights kept in twelve bits each, equal to the bit (native/compressed.h).

Most of a decode step is waiting for weights; three quarters of the bytes take three quarters of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stemma.model.cpu.weight_memory import give_back, weight_memory
from stemma.native.library import Kernels
from stemma.native.structures import CompressArgs, PackArgs, Strips

_STRIP = 64
"""Outputs."""
_PATCH_BYTES = 8
_INPUTS_OF_TILE = 32
_INPUTS_A_PATCH = 16
"""Inputs for each patch: at most one weight in 1,024 may need a patch, or patching takes what was gained."""


def can_compress(kernels: Kernels, strips: Strips, dtype: torch.dtype) -> bool:
    """Whether the kernels read a weight of this shape and dtype in compressed form."""
    fits = strips.n >= _STRIP and strips.k % _INPUTS_OF_TILE == 0
    return fits and dtype == torch.bfloat16 and bool(kernels.reads_compressed())


@dataclass(frozen=True, slots=True)
class CompressedWeight:
    """A weight, packed and compressed."""

    strips: Strips
    """Valid as long as this object."""
    room: torch.Tensor
    patches: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.room.nbytes + self.patches.nbytes


def compress(
    kernels: Kernels, sources: Sequence[PackArgs], strips: Strips, num_threads: int
) -> CompressedWeight | None:
    """Pack bf16 weights below each other in compressed form; None where too many of them need a patch.

    `strips`: shape and bias of all together. Of `sources` all but the target counts.
    """
    count, most = -(-strips.n // _STRIP), strips.k // _INPUTS_A_PATCH
    room = weight_memory(kernels.compressed_bytes(ctypes.addressof(strips)))
    strips.data = room.data_ptr()
    found = np.empty((count, most * _PATCH_BYTES), np.uint8)
    counts = np.zeros(count, np.int32)
    array = (PackArgs * len(sources))(*sources)
    where = ctypes.addressof(array)
    args = CompressArgs(where, len(sources), strips, found.ctypes.data, counts.ctypes.data, most, num_threads)
    kernels.compress(ctypes.addressof(args))
    if counts.max() > most:
        give_back(room)
        return None
    starts = np.zeros((count + 2) // 2 * 2, np.uint32)  # of a strip's patches, which follow
    np.cumsum(counts, out=starts[1 : count + 1])
    kept = [found[i, : counts[i] * _PATCH_BYTES] for i in np.nonzero(counts)[0]]
    patches = torch.from_numpy(np.concatenate([starts.view(np.uint8), *kept]))
    strips.patches = patches.data_ptr()
    return CompressedWeight(strips, room, patches)
