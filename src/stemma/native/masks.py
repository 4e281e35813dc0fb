"""The most likely of the tokens that a mask allows; with kernels in one pass over logits and bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stemma.native.library import load_kernels

MaskedArgmax = Callable[[npt.NDArray[np.float32], npt.NDArray[np.uint32]], int]
"""The first place of the largest of those of x [n] whose bits are set in mask [ceil(n / 32)], lowest bit
first; -1 if no bit is. Both arrays are contiguous; x has no NaN."""


def masked_argmax_function(isa: str = "auto") -> MaskedArgmax:
    """Return it by the kernels of a level, as in `load_kernels`, else by numpy."""
    kernels = load_kernels(isa)
    if kernels is None:
        return _masked_argmax
    native = kernels.masked_argmax

    def masked_argmax(x: npt.NDArray[np.float32], mask: npt.NDArray[np.uint32]) -> int:
        assert 32 * len(mask) >= len(x)
        return int(native(x.ctypes.data, mask.ctypes.data, len(x)))

    return masked_argmax


def _masked_argmax(x: npt.NDArray[np.float32], mask: npt.NDArray[np.uint32]) -> int:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(x)]
    ids = np.flatnonzero(bits)
    return int(ids[x[ids].argmax()]) if len(ids) else -1
