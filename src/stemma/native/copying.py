"""Copies of blocks between host tiers and a CPU device; with kernels they bypass the processor's caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from stemma.native.library import load_kernels

CopyBytes = Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]
"""Copies the second array's bytes into the first; both contiguous and of one size. Releases the GIL."""


def copy_function(isa: str = "auto") -> CopyBytes:
    """Return the fastest copy for arrays of some 100 kB and more that nobody reads right afterwards.

    `isa` is the level of the kernels, as in `load_kernels`.
    """
    kernels = load_kernels(isa)
    if kernels is None:
        return np.copyto
    native = kernels.copy

    def copy(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
        assert target.nbytes == source.nbytes
        native(target.ctypes.data, source.ctypes.data, target.nbytes)

    return copy
