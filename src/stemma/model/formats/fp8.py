"""FP8 checkpoints (DeepSeek-V3's format and MXFP8) as plain weights: a weight times the scale of its block.

DeepSeek-V4's experts are FP4 (E2M1) in them: two codes a byte, the lower one first, and a scale for 32.

transformers' own conversion derives the block size from the number of scales, which is wrong if a weight
isn't a whole number of blocks (576 rows in blocks of 128). Here weights are dequantized where they are asked
for: correct, but twice the file's bytes in memory. A fused decoder on a GPU takes the codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stemma.errors import ModelError
from stemma.model.files.directory import StoredTensor
from stemma.model.formats.checkpoint import CheckpointTensors, ReadWeights
from stemma.model.formats.mxfp4 import MXFP4_LEVELS
from stemma.model.formats.summary import FormatCounts
from stemma.model.weights.stored import CodedFloats, StoredWeights

METHODS = ("fp8", "mxfp8")
"""Names of the format in config.json, `quantization_config.quant_method`."""
_FP8 = ("F8_E4M3", "F8_E5M2")
_WEIGHT_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
_ACTIVATION_SCALES = (".activation_scale", ".input_scale")
"""Scales of activations, for products in FP8; without them activations need no scale."""
_E8M0_BIAS = 127
_FP4_GROUP = 32


def read_weights(
    tensors: CheckpointTensors, quantization: dict[str, Any], dtype: torch.dtype
) -> tuple[StoredWeights, FormatCounts]:
    """Return all weights of an FP8 checkpoint by name, the FP8 ones as numbers of `dtype`.

    Raises ModelError naming the tensor whose scales are missing or don't fit.
    """
    block = _block_size(tensors.path, quantization)
    read = ReadWeights(tensors, dtype)
    for name, tensor in tensors.stored.items():
        if tensor.dtype in _FP8:
            scale = _scale_of(tensors.path, tensor, tensors.stored)
            codes, scales = tensors.read(name), tensors.read(scale)
            read.add_floats(name, coded_floats(tensors.path, name, codes, scales, block, dtype), "FP8")
            read.take(name, scale)
        elif tensor.dtype == "I8" and quantization.get("expert_dtype") == "fp4":
            scale = _scale_of(tensors.path, tensor, tensors.stored)
            numbers = _numbers_of(tensors.read(name))
            weight = coded_floats(tensors.path, name, numbers, tensors.read(scale), (1, _FP4_GROUP), dtype)
            read.add_floats(name, weight, "FP4")
            read.take(name, scale)
        elif name.endswith(_ACTIVATION_SCALES):
            read.take(name)
    return read.finish()


def _block_size(path: Path, quantization: dict[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns that share a scale; None: a scale for the weight or for each of its rows."""
    given = quantization.get("weight_block_size")
    if given is None:
        return (1, 32) if quantization.get("quant_method") == "mxfp8" else None
    if (
        not isinstance(given, list | tuple)
        or len(given) != 2
        or not all(type(n) is int and n > 0 for n in given)
    ):
        raise ModelError(f"{path}: weight_block_size is {given!r}, must be two positive whole numbers")
    return given[0], given[1]


def _numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """Return what FP4 codes [rows, columns / 2] stand for, float32 [rows, columns]."""
    pairs = codes.view(torch.uint8)
    both = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
    return MXFP4_LEVELS.float()[both.int()] / 2


def _scale_of(path: Path, tensor: StoredTensor, stored: dict[str, StoredTensor]) -> str:
    stem = tensor.name.removesuffix(".weight")
    for suffix in _WEIGHT_SCALES:
        if stem + suffix in stored:
            return stem + suffix
    raise ModelError(
        f"{path}: {tensor.name} is quantized, but its scales ({stem}.weight_scale_inv) are missing"
    )


def coded_floats(
    path: Path,
    name: str,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] | None,
    dtype: torch.dtype,
) -> CodedFloats:
    """Join FP8 or float32 [rows, columns] and their scales; the last blocks may be partial.

    `block`: rows and columns that share a scale. Raises ModelError if the scales don't fit.
    """
    # uint8 holds the exponents of E8M0; torch's own dtype for it is `float8_e8m0fnu`.
    factor = (scale.float() - _E8M0_BIAS).exp2() if scale.dtype == torch.uint8 else scale.float()
    rows, columns = weight.shape[-2:]
    if factor.numel() == 1:
        whole = factor.reshape(()).expand(*weight.shape[:-1], 1)
        return CodedFloats(weight, whole, columns, dtype)
    high, wide = block or (1, columns)
    expected = (*weight.shape[:-2], -(-rows // high), -(-columns // wide))
    if block is None and factor.shape == weight.shape[:-1]:
        factor = factor[..., None]
    if factor.shape != expected:
        raise ModelError(
            f"{path}: {name} {list(weight.shape)} in blocks of {high} x {wide} needs scales "
            f"{list(expected)}, the file has {list(factor.shape)}; correct weight_block_size in config.json"
        )
    factor = factor.repeat_interleave(high, -2)[..., :rows, :]
    return CodedFloats(weight, factor, wide, dtype)
