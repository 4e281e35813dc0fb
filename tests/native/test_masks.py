"""The best of what a mask allows, at every level and without kernels."""

from __future__ import annotations

import numpy as np
import pytest

from stemma.native.masks import masked_argmax_function
from tests.native.isa import level_params


@pytest.mark.parametrize("isa", [*level_params(), None])
def test_argmax_over_a_mask(isa: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa is None:
        monkeypatch.setenv("STEMMA_NATIVE", "0")
    argmax = masked_argmax_function(isa or "auto")
    rng = np.random.default_rng(3)
    for size in (1, 15, 16, 31, 32, 33, 250, 1000):
        for share in (0.0, 0.02, 0.5, 1.0):
            x = rng.integers(-3, 3, size=size).astype(np.float32)
            x[rng.random(size) < 0.2] = -np.inf
            allowed = rng.random(size) < share
            mask = np.zeros((size + 31) // 32, dtype=np.uint32)
            mask.view(np.uint8)[: (size + 7) // 8] = np.packbits(allowed, bitorder="little")
            mask[-1] |= np.uint32(
                (0xFFFFFFFF << (size % 32)) & 0xFFFFFFFF if size % 32 else 0
            )  # beyond the end
            ids = np.flatnonzero(allowed)
            expected = int(ids[x[ids].argmax()]) if len(ids) else -1
            assert argmax(x, mask) == expected, (size, share)
