"""Codes of GGUF's blocks, taken apart by the kernels and by torch: the `gguf` package's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from stemma.model.formats.gguf.tensors import is_kept, split
from stemma.native.library import drop_kernels, load_kernels

KINDS = [kind for kind in GGMLQuantizationType if is_kept(kind)]
SEED_BYTES = 0x3C
"""No half and no exponent made of bytes up to this is infinite."""


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_numbers_are_those_of_gguf(kind: GGMLQuantizationType, by_kernels: bool) -> None:
    drop_kernels()
    if by_kernels and load_kernels() is None:
        pytest.skip("needs native kernels")
    block_bytes = GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(kind)
    try:
        for rows, blocks in ((1, 1), (1, 3), (5, 1), (70, 2)):
            data = rng.integers(0, SEED_BYTES, (rows, blocks * block_bytes), np.uint8)
            found = split(data, kind).dequantize(torch.float32)
            assert np.array_equal(found.numpy(), dequantize(data, kind))
    finally:
        drop_kernels()
