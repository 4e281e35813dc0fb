"""Tensors of a GGUF file: their bytes, and ggml's block formats as codes and scales.

Each format below is exactly a code of 4, 5, 6 or 8 bits times the scale of its group, most with a minimum
on top, so nothing is lost. Layouts are those of ggml-quants.c. The formats that are missing here (IQ1 to IQ3,
TQ) are dequantized by the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from gguf.quants import IQ4_NL

from stemma.errors import ModelError
from stemma.model.files.gguf_header import GGUFTensor
from stemma.model.formats.mxfp4 import MXFP4_LEVELS, mxfp4_scales
from stemma.model.weights.fields import Codes, Field, PackedFields, fields_of
from stemma.model.weights.multiples import GroupNumbers, Multiples
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight

_Kind = GGMLQuantizationType
_PLAIN = {
    _Kind.F32: torch.float32,
    _Kind.F16: torch.float16,
    _Kind.BF16: torch.bfloat16,
    _Kind.F64: torch.float64,
}
_AT_ONCE = 1 << 18
"""Numbers that are widened together."""


def raw_data(tensor: GGUFTensor, expert: int | None = None) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor, uint8 [..., bytes of a row], or of one `expert` of those it stacks.

    They lie in the file's pages: memory that the system has to clear first took longer than reading.
    Raises ModelError if the file ends before.
    """
    shape, num_bytes, start = tensor.shape, tensor.num_bytes, tensor.start
    if expert is not None:
        num_bytes //= shape[0]
        start += expert * num_bytes
        shape = shape[1:]
    try:
        data = np.memmap(tensor.file, np.uint8, "c", start, (num_bytes,)).view(np.ndarray)
    except OSError as error:
        raise ModelError(f"can't read {tensor.file}: {error}") from error
    except ValueError as error:
        raise ModelError(f"{tensor.file} ends before its tensor {tensor.name}; download it again") from error
    block, block_bytes = GGML_QUANT_SIZES[tensor.type]
    return data.reshape(*shape[:-1], shape[-1] // block * block_bytes)


def is_read(kind: GGMLQuantizationType) -> bool:
    """Whether tensors of this type can become numbers."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return kind in _PLAIN
    return True


def is_kept(kind: GGMLQuantizationType) -> bool:
    """Whether tensors of this type become a `QuantizedWeight`."""
    return kind in _SPLITTERS


def widen(data: npt.NDArray[np.uint8], kind: GGMLQuantizationType, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of rows of bytes [..., bytes] as [..., values], rounded once to `dtype`."""
    if kind in _PLAIN:
        return torch.from_numpy(data).view(_PLAIN[kind]).to(dtype, copy=True)  # apart from the file
    if kind not in _SPLITTERS:
        return torch.from_numpy(dequantize(data, kind)).to(dtype)
    flat = data.reshape(-1, data.shape[-1])
    block, block_bytes = GGML_QUANT_SIZES[kind]
    wide = torch.empty(len(flat), flat.shape[1] // block_bytes * block, dtype=dtype)
    step = max(1, _AT_ONCE // wide.shape[1])
    for first in range(0, len(flat), step):  # what lies between stays in caches
        wide[first : first + step] = split(flat[first : first + step], kind).dequantize(dtype)
    return wide.view(*data.shape[:-1], wide.shape[1])


def split(data: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> QuantizedWeight:
    """Return rows of bytes [rows, bytes] of a type that `is_kept` as codes and scales [rows, ...].

    Its numbers are those of ggml bit for bit. Raises ModelError if a scale isn't finite.
    """
    _, block_bytes = GGML_QUANT_SIZES[kind]
    return _SPLITTERS[kind](torch.from_numpy(data).view(data.shape[0], -1, block_bytes))


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the float16 at an offset of each block as float32 [rows, blocks, 1]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


def _weight(
    codes: Codes,
    scales: GroupNumbers,
    bits: int,
    minimums: GroupNumbers | None = None,
    levels: torch.Tensor | None = None,
    *,
    is_unsigned: bool = False,
) -> QuantizedWeight:
    """Make a weight of codes [rows, n] and numbers [rows, groups]."""
    return QuantizedWeight(
        codes=codes,
        scales=scales,
        zero_points=None,
        bits=bits,
        group_size=codes.shape[1] // scales.shape[1],
        activations=ActivationScheme.NONE,
        minimums=minimums,
        is_unsigned=is_unsigned,
        levels=levels,
    )


def _one_each(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the float16 at an offset of each block as numbers of groups, float32 [rows, blocks]."""
    return _half(blocks, offset).flatten(1)


def _multiples(integers: torch.Tensor, units: torch.Tensor) -> Multiples:
    """Make numbers of integers [rows, blocks, groups], below 128, and units [rows, blocks, 1]."""
    return Multiples(integers.view(torch.int8).flatten(1), units.flatten(1))


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(PackedFields(blocks, Field(2, 16, 4, 16), added=-8), _one_each(blocks, 0), 4)


def _q4_1(blocks: torch.Tensor) -> QuantizedWeight:
    codes = PackedFields(blocks, Field(4, 16, 4, 16))
    return _weight(codes, _one_each(blocks, 0), 4, _one_each(blocks, 2), is_unsigned=True)


def _q5_0(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(_five_bits(blocks, 2) - 16, _one_each(blocks, 0), 5)


def _q5_1(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(_five_bits(blocks, 4), _one_each(blocks, 0), 5, _one_each(blocks, 2), is_unsigned=True)


def _five_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return codes of which a block has the fifth bits `at` a byte, then the lower four; int8 [rows, n]."""
    low = PackedFields(blocks, Field(at + 4, 16, 4, 16)).apart()
    bits = (blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return low | bits.flatten(1).view(torch.int8) << 4


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(PackedFields(blocks, Field(2, 32, 8, 32)), _one_each(blocks, 0), 8)


def _q2_k(blocks: torch.Tensor) -> QuantizedWeight:
    scales = _multiples(blocks[..., :16] & 15, _half(blocks, 80))
    minimums = _multiples(blocks[..., :16] >> 4, -_half(blocks, 82))
    return _weight(PackedFields(blocks, Field(16, 64, 2, 32)), scales, 4, minimums, is_unsigned=True)


def _q3_k(blocks: torch.Tensor) -> QuantizedWeight:
    scales = fields_of(blocks[..., 96:104], 4, 8) | (fields_of(blocks[..., 104:108], 2, 4) << 4)
    codes = PackedFields(blocks, Field(32, 64, 2, 32), Field(0, 32, 1, 32), added=-4)
    return _weight(codes, _multiples(scales.view(torch.int8) - 32, _half(blocks, 108)), 4)


def _scales_and_minimums(blocks: torch.Tensor) -> tuple[Multiples, Multiples]:
    """Return the scales and minimums of Q4_K and Q5_K, 8 a block: 6 bits each in 12 bytes."""
    low, middle, high = blocks.view(torch.int32)[..., 1:4].unbind(-1)  # four bytes at a time
    numbers = blocks.new_empty(2, *blocks.shape[:2], 2, dtype=torch.int32)
    for number, (word, above) in enumerate(((low, high), (middle, high >> 4))):
        numbers[number, ..., 0] = word & 0x3F3F3F3F
        numbers[number, ..., 1] = (above & 0x0F0F0F0F) | ((word >> 2) & 0x30303030)
    scales, minimums = numbers.view(torch.uint8)
    return _multiples(scales, _half(blocks, 0)), _multiples(minimums, -_half(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    scales, minimums = _scales_and_minimums(blocks)
    return _weight(PackedFields(blocks, Field(16, 128, 4, 32)), scales, 4, minimums, is_unsigned=True)


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    scales, minimums = _scales_and_minimums(blocks)
    codes = PackedFields(blocks, Field(48, 128, 4, 32), Field(16, 32, 1, 32))
    return _weight(codes, scales, 5, minimums, is_unsigned=True)


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    codes = PackedFields(blocks, Field(0, 128, 4, 64), Field(128, 64, 2, 32), added=-32)
    scales = _multiples(blocks[..., 192:208].contiguous().view(torch.int8), _half(blocks, 208))
    return _weight(codes, scales, 6)


_IQ4_LEVELS = torch.tensor(IQ4_NL.kvalues, dtype=torch.int8)


def _iq4_nl(blocks: torch.Tensor) -> QuantizedWeight:
    codes = PackedFields(blocks, Field(2, 16, 4, 16))
    return _weight(codes, _one_each(blocks, 0), 4, levels=_IQ4_LEVELS, is_unsigned=True)


def _iq4_xs(blocks: torch.Tensor) -> QuantizedWeight:
    scales = fields_of(blocks[..., 4:8], 4, 1) | (fields_of(blocks[..., 2:4], 2, 1) << 4)
    numbers = _multiples(scales.view(torch.int8) - 32, _half(blocks, 0))
    codes = PackedFields(blocks, Field(8, 128, 4, 16))
    return _weight(codes, numbers, 4, levels=_IQ4_LEVELS, is_unsigned=True)


def _mxfp4(blocks: torch.Tensor) -> QuantizedWeight:
    scales = mxfp4_scales(blocks[..., 0])
    codes = PackedFields(blocks, Field(1, 16, 4, 16))
    return _weight(codes, scales, 4, levels=MXFP4_LEVELS, is_unsigned=True)


_SPLITTERS: dict[GGMLQuantizationType, Callable[[torch.Tensor], QuantizedWeight]] = {
    _Kind.Q4_0: _q4_0,
    _Kind.Q4_1: _q4_1,
    _Kind.Q5_0: _q5_0,
    _Kind.Q5_1: _q5_1,
    _Kind.Q8_0: _q8_0,
    _Kind.Q2_K: _q2_k,
    _Kind.Q3_K: _q3_k,
    _Kind.Q4_K: _q4_k,
    _Kind.Q5_K: _q5_k,
    _Kind.Q6_K: _q6_k,
    _Kind.IQ4_NL: _iq4_nl,
    _Kind.IQ4_XS: _iq4_xs,
    _Kind.MXFP4: _mxfp4,
}
