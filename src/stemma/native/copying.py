"""Copies of blocks between host tiers and a CPU device; with kernels they bypass the processor's caches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from stemma.native.library import load_kernels

CopyBytes = Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]
"""Copies the second array's bytes into the first; both contiguous and of one size. Releases the GIL."""


Numbers = npt.NDArray[np.int64]
CopyRuns = Callable[[Numbers, Numbers, Numbers], None]
"""Copies runs of bytes: addresses of targets and of sources, and lengths, [n] each. Releases the GIL."""


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


def copy_runs_function(isa: str = "auto") -> CopyRuns:
    """Return the fastest copy of many runs of some 10 kB and more. `isa` as for `copy_function`."""
    kernels = load_kernels(isa)
    if kernels is None:
        return _move_runs
    native = kernels.copy_runs

    def copy(targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        columns = [np.ascontiguousarray(column, np.int64) for column in (targets, sources, sizes)]
        assert {column.shape for column in columns} == {(len(targets),)}
        native(*(column.ctypes.data for column in columns), len(targets))

    return copy


def _move_runs(targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
    for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
