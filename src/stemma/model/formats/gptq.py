"""GPTQ checkpoints (AutoGPTQ, GPTQModel): codes of 2, 3, 4 or 8 bits, packed along the inputs.

Value = scale * (code - zero point). Version 1 of the format stores zero points less one: its writers subtract
from whole words of 32 bits, so that a zero point of 0 borrows from the next one, and its readers add in the
same way. With `desc_act`, groups are made of inputs that lie apart (`g_idx`); such weights are dequantized at
load.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.formats.checkpoint import CheckpointTensors, ReadWeights, make_weight
from stemma.model.formats.permuted import dequantize_permuted, permuted_groups
from stemma.model.formats.summary import FormatCounts
from stemma.model.weights.fields import Codes, fields_of_words
from stemma.model.weights.quantized import QuantizedWeight
from stemma.model.weights.stored import StoredWeights

_BITS = (2, 3, 4, 8)
_VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""Format -> what is added to stored zero points."""


def read_weights(
    tensors: CheckpointTensors, quantization: dict[str, Any], dtype: torch.dtype
) -> tuple[StoredWeights, FormatCounts]:
    """Return all weights. Raises ModelError for what contradicts itself, UnsupportedModel for other
    formats."""
    version = quantization.get("checkpoint_format", "gptq")
    if version not in _VERSIONS:
        raise UnsupportedModel(
            f"{tensors.path} is GPTQ in the format {version!r}; read are {' and '.join(_VERSIONS)}. Save it "
            "again in one of them, or take the unquantized checkpoint"
        )
    bits = quantization.get("bits")
    if type(bits) is not int or bits not in _BITS:
        raise UnsupportedModel(f"{tensors.path} is GPTQ with bits {bits!r}; read are 2, 3, 4 and 8")
    if quantization.get("dynamic"):
        raise UnsupportedModel(f"{tensors.path} has other GPTQ settings for some layers (dynamic); not read")
    read = ReadWeights(tensors, dtype)
    for stem in tensors.stems(".qweight"):
        _add(read, stem, bits, _VERSIONS[version])
    return read.finish()


def _add(read: ReadWeights, stem: str, bits: int, added: int) -> None:
    tensors = read.tensors
    inputs, outputs, num_groups = _shape(tensors, stem, bits)
    tensors.read_floats(f"{stem}.scales")  # what isn't finite is refused now; codes are read later
    make = partial(_weight, tensors, stem, bits, added)
    groups = None
    if f"{stem}.g_idx" in tensors:
        named = tensors.read_shape(f"{stem}.g_idx", (inputs,), (torch.int32, torch.int64)).long()
        groups = permuted_groups(f"{tensors.path}: {stem}.g_idx", named, num_groups)
    if groups is None:
        read.add_checked(f"{stem}.weight", torch.Size((outputs, inputs)), make, f"GPTQ {bits} bits")
    else:
        read.add_plain(
            f"{stem}.weight", dequantize_permuted(make(), groups), f"GPTQ {bits} bits with permuted groups"
        )
    read.take(*(f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")))


def _shape(tensors: CheckpointTensors, stem: str, bits: int) -> tuple[int, int, int]:
    """Return a weight's inputs, outputs and groups, as headers of files have them."""
    where = f"{tensors.path}: {stem}.qweight"
    words, outputs = packed = tensors.shape(f"{stem}.qweight", 2)
    if words * 32 % bits:
        raise ModelError(f"{where} {list(packed)} isn't packed in {bits} bits")
    scales, zeros = tensors.shape(f"{stem}.scales", 2), tensors.shape(f"{stem}.qzeros", 2)
    if scales[1] != outputs or zeros != (scales[0], outputs * bits // 32):
        raise ModelError(
            f"{where} {list(packed)} of {bits} bits doesn't fit scales {list(scales)} and qzeros "
            f"{list(zeros)}; correct bits in config.json"
        )
    return words * 32 // bits, outputs, scales[0]


def _weight(tensors: CheckpointTensors, stem: str, bits: int, added: int) -> QuantizedWeight:
    inputs, outputs, num_groups = _shape(tensors, stem, bits)
    packed = tensors.read(f"{stem}.qweight", (torch.int32,))
    scales = tensors.read_floats(f"{stem}.scales")
    packed_zeros = tensors.read(f"{stem}.qzeros", (torch.int32,))
    if added:
        packed_zeros = _add_ones(packed_zeros, bits)
    shape = torch.Size((inputs, outputs))
    codes: Codes = (
        fields_of_words(packed.T, bits)
        if bits in (4, 8)
        else unpack_from_int32(packed, bits, shape, packed_dim=0).T
    )
    zeros: torch.Tensor = unpack_from_int32(packed_zeros, bits, torch.Size((num_groups, outputs)))
    return make_weight(f"{tensors.path}: {stem}.qweight", codes, scales.T, zeros.T, bits)


def _add_ones(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Add 1 to each code of words [groups, outputs * bits / 32] (int32), modulo 2^32 in each word.

    32 codes of 3 bits lie in three words: a 1 stands where a code begins.
    """
    period = 3 if bits == 3 else 1
    ones = sum(1 << at for at in range(0, 32 * period, bits))
    added = torch.tensor([ones >> 32 * word & 0xFFFFFFFF for word in range(period)]).repeat(
        words.shape[1] // period
    )
    total = (words.long() + added) & 0xFFFFFFFF
    return (total - (total >> 31 << 32)).int()
