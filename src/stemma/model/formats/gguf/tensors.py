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
from stemma.model.weights.multiples import GroupNumbers, Multiples
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from stemma.native.library import loaded_kernels
from stemma.native.spreading import spread

_Kind = GGMLQuantizationType
_PLAIN = {
    _Kind.F32: torch.float32,
    _Kind.F16: torch.float16,
    _Kind.BF16: torch.bfloat16,
    _Kind.F64: torch.float64,
}


def raw_data(tensor: GGUFTensor, expert: int | None = None) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor, uint8 [..., bytes of a row], or of one `expert` of those it stacks.

    Raises ModelError if the file ends before.
    """
    shape, num_bytes, start = tensor.shape, tensor.num_bytes, tensor.start
    if expert is not None:
        num_bytes //= shape[0]
        start += expert * num_bytes
        shape = shape[1:]
    try:
        data = np.fromfile(tensor.file, np.uint8, num_bytes, offset=start)
    except OSError as error:
        raise ModelError(f"can't read {tensor.file}: {error}") from error
    if data.size != num_bytes:
        raise ModelError(f"{tensor.file} ends before its tensor {tensor.name}; download it again")
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
        return torch.from_numpy(data).view(_PLAIN[kind]).to(dtype)
    if kind not in _SPLITTERS:
        return torch.from_numpy(dequantize(data, kind)).to(dtype)
    rows = split(data.reshape(-1, data.shape[-1]), kind).dequantize(dtype)
    return rows.view(*data.shape[:-1], rows.shape[-1])


def split(data: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> QuantizedWeight:
    """Return rows of bytes [rows, bytes] of a type that `is_kept` as codes and scales [rows, ...].

    Its numbers are those of ggml bit for bit. Raises ModelError if a scale isn't finite.
    """
    _, block_bytes = GGML_QUANT_SIZES[kind]
    return _SPLITTERS[kind](torch.from_numpy(data).view(data.shape[0], -1, block_bytes))


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the float16 at an offset of each block as float32 [rows, blocks, 1]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


def _fields(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Return fields of `bits` bits of packed uint8 [rows, blocks, n], as [rows, blocks, n * 8 / bits].

    Of each run of `width` bytes come the lowest fields first, then the next.
    """
    runs = packed.reshape(*packed.shape[:2], -1, width)
    fields = runs.new_empty(*runs.shape[:3], 8 // bits, width)
    for number in range(8 // bits):
        torch.bitwise_and(runs >> bits * number, (1 << bits) - 1, out=fields[..., number, :])
    return fields.flatten(2)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the bits of uint8 [rows, blocks, n] from the lowest on, as [rows, blocks, 8 n]."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(2)


def _codes(
    low: torch.Tensor,
    bits: int,
    width: int,
    *,
    high: tuple[torch.Tensor, int, int] | None = None,
    added: int = 0,
) -> torch.Tensor:
    """Return codes [rows, blocks, n] of `_fields`, with those of `high` above them, and `added` to each.

    They are int8, or uint8 where nothing is added. The kernels do it in one pass where they are loaded.
    """
    kernels = loaded_kernels()
    if kernels is not None:
        codes = spread(kernels, low, bits, width, added=0 if high else added)
        if high is not None:
            spread(kernels, *high, left=bits, added=added, onto=codes)
    else:
        codes = _fields(low, bits, width)
        if high is not None:
            codes |= _fields(*high) << bits
        codes = codes.view(torch.int8) + added
    return codes if added else codes.view(torch.uint8)


def _weight(
    codes: torch.Tensor,
    scales: GroupNumbers,
    bits: int,
    minimums: GroupNumbers | None = None,
    levels: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Make a weight of codes [rows, blocks, n], unsigned unless they are int8, and numbers [rows, groups]."""
    return QuantizedWeight(
        codes=codes.flatten(1).view(torch.int8),
        scales=scales,
        zero_points=None,
        bits=bits,
        group_size=codes.shape[1] * codes.shape[2] // scales.shape[1],
        activations=ActivationScheme.NONE,
        minimums=minimums,
        is_unsigned=codes.dtype == torch.uint8,
        levels=levels,
    )


def _one_each(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the float16 at an offset of each block as numbers of groups, float32 [rows, blocks]."""
    return _half(blocks, offset).flatten(1)


def _multiples(integers: torch.Tensor, units: torch.Tensor) -> Multiples:
    """Make numbers of integers [rows, blocks, groups], below 128, and units [rows, blocks, 1]."""
    return Multiples(integers.to(torch.int8).flatten(1), units.flatten(1))


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(_codes(blocks[..., 2:], 4, 16, added=-8), _one_each(blocks, 0), 4)


def _q4_1(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(_codes(blocks[..., 4:], 4, 16), _one_each(blocks, 0), 4, _one_each(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _codes(blocks[..., 6:], 4, 16)
    return _weight((codes | _bits(blocks[..., 2:6]) << 4).view(torch.int8) - 16, _one_each(blocks, 0), 5)


def _q5_1(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _codes(blocks[..., 8:], 4, 16) | (_bits(blocks[..., 4:8]) << 4)
    return _weight(codes, _one_each(blocks, 0), 5, _one_each(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(blocks[..., 2:].contiguous().view(torch.int8), _one_each(blocks, 0), 8)


def _q2_k(blocks: torch.Tensor) -> QuantizedWeight:
    scales = _multiples(blocks[..., :16] & 15, _half(blocks, 80))
    minimums = _multiples(blocks[..., :16] >> 4, -_half(blocks, 82))
    return _weight(_codes(blocks[..., 16:80], 2, 32), scales, 4, minimums)


def _q3_k(blocks: torch.Tensor) -> QuantizedWeight:
    scales = _fields(blocks[..., 96:104], 4, 8) | (_fields(blocks[..., 104:108], 2, 4) << 4)
    codes = _codes(blocks[..., 32:96], 2, 32, high=(blocks[..., :32], 1, 32), added=-4)
    return _weight(codes, _multiples(scales.view(torch.int8) - 32, _half(blocks, 108)), 4)


def _scales_and_minimums(blocks: torch.Tensor) -> tuple[Multiples, Multiples]:
    """Return the scales and minimums of Q4_K and Q5_K, 8 a block: 6 bits each in 12 bytes."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=-1)
    minimums = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], dim=-1)
    return _multiples(scales, _half(blocks, 0)), _multiples(minimums, -_half(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    scales, minimums = _scales_and_minimums(blocks)
    return _weight(_codes(blocks[..., 16:], 4, 32), scales, 4, minimums)


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    scales, minimums = _scales_and_minimums(blocks)
    codes = _codes(blocks[..., 48:], 4, 32, high=(blocks[..., 16:48], 1, 32))
    return _weight(codes, scales, 5, minimums)


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _codes(blocks[..., :128], 4, 64, high=(blocks[..., 128:192], 2, 32), added=-32)
    scales = _multiples(blocks[..., 192:208].contiguous().view(torch.int8), _half(blocks, 208))
    return _weight(codes, scales, 6)


_IQ4_LEVELS = torch.tensor(IQ4_NL.kvalues, dtype=torch.int8)


def _iq4_nl(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(_codes(blocks[..., 2:], 4, 16), _one_each(blocks, 0), 4, levels=_IQ4_LEVELS)


def _iq4_xs(blocks: torch.Tensor) -> QuantizedWeight:
    scales = _fields(blocks[..., 4:8], 4, 1) | (_fields(blocks[..., 2:4], 2, 1) << 4)
    numbers = _multiples(scales.view(torch.int8) - 32, _half(blocks, 0))
    return _weight(_codes(blocks[..., 8:], 4, 16), numbers, 4, levels=_IQ4_LEVELS)


def _mxfp4(blocks: torch.Tensor) -> QuantizedWeight:
    scales = mxfp4_scales(blocks[..., 0])
    return _weight(_codes(blocks[..., 1:], 4, 16), scales, 4, levels=MXFP4_LEVELS)


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
