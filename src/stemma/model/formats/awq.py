"""AWQ checkpoints (AutoAWQ, layout `gemm`): 4-bit codes, eight outputs to a word in an order of their own.

Value = scale * (code - zero point), codes and zero points 0..15.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.formats.checkpoint import CheckpointTensors, ReadWeights, make_weight
from stemma.model.formats.summary import FormatCounts
from stemma.model.weights.quantized import QuantizedWeight
from stemma.model.weights.stored import StoredWeights

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Order of a word's eight fields: counted from the lowest, field _ORDER[n] is that of output n."""


def read_weights(
    tensors: CheckpointTensors, quantization: dict[str, Any], dtype: torch.dtype
) -> tuple[StoredWeights, FormatCounts]:
    """Return all weights. Raises ModelError for what contradicts itself, UnsupportedModel for other
    layouts."""
    version = str(quantization.get("version", quantization.get("format", "gemm"))).lower()
    if version != "gemm" or quantization.get("bits", quantization.get("w_bit")) != 4:
        bits = quantization.get("bits", quantization.get("w_bit"))
        raise UnsupportedModel(
            f"{tensors.path} is AWQ in layout {version!r} with bits {bits!r}; read is gemm with 4 bits. Take "
            "such a checkpoint, or the unquantized one"
        )
    read = ReadWeights(tensors, dtype)
    for stem in tensors.stems(".qweight"):
        inputs, words = tensors.shape(f"{stem}.qweight", 2)
        shape = torch.Size((8 * words, inputs))
        tensors.read_floats(f"{stem}.scales")  # what isn't finite is refused now; codes are read later
        read.add_checked(f"{stem}.weight", shape, partial(_weight, tensors, stem), "AWQ 4 bits")
        read.take(*(f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")))
    return read.finish()


def _weight(tensors: CheckpointTensors, stem: str) -> QuantizedWeight:
    packed = tensors.read(f"{stem}.qweight", (torch.int32,))
    scales = tensors.read_floats(f"{stem}.scales")
    where = f"{tensors.path}: {stem}.qweight"
    if packed.dim() != 2 or scales.dim() != 2 or scales.shape[1] != packed.shape[1] * 8:
        raise ModelError(f"{where} {list(packed.shape)} doesn't fit scales {list(scales.shape)}")
    zeros = None
    if f"{stem}.qzeros" in tensors:
        shape = (scales.shape[0], packed.shape[1])
        zeros = _unpacked(tensors.read_shape(f"{stem}.qzeros", shape, (torch.int32,))).T
    return make_weight(where, _unpacked(packed).T, scales.T, zeros, bits=4)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Return int32 [rows, n] as codes less 8, int8 [rows, 8 n]."""
    pairs = words.contiguous().view(torch.uint8).view(*words.shape, 4, 1)
    fields = torch.cat([pairs & 15, pairs >> 4], -1).flatten(-2)
    return (fields[..., list(_ORDER)].view(torch.int8) - 8).flatten(1)
