"""KV as codes of one byte with scales: what `kv_cache_dtype` int8 and fp8 store.

A row is the key or the value of one token and KV head. It has one scale; a latent (MLA) has two, one for the
compressed part and one for the rotary key, whose numbers may be much larger. ``number = code * scale``, with

- scale = the row's largest magnitude / the largest code, rounded up to bfloat16, so that no code is clipped;
- int8: code = number / scale, rounded to the nearest integer (ties to even), -127 to 127;
- fp8: the same, rounded to the nearest e4m3 (OCP 8-bit floating point, no infinities), -448 to 448.

A row with a number that isn't finite gets the scale NaN: what reads it shows that something is wrong. The
functions here run on torch. The kernels (`native/kv_format.h`) compute the same bytes and the same numbers.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from stemma.memory.device.kv import TORCH_DTYPES
from stemma.memory.device.layout import COLUMNS, SCALE_BYTES, KVLayout, StoredAs

LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}
MIN_SCALE = 1e-30
"""Scale of a row of zeros, or nearly so: a scale and its inverse stay normal numbers."""


def encode(rows: torch.Tensor, stored: StoredAs, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn rows [..., D] into codes [..., D] uint8 and scales [..., len(dims)] bfloat16.

    `dims` sum up to D: how many numbers each scale is for.
    """
    codes, scales = [], []
    for part in torch.split(rows.float(), list(dims), dim=-1):
        scale = _scale(part.abs().amax(dim=-1), LARGEST_CODE[stored])
        shares = (part * (1.0 / scale.float())[..., None]).nan_to_num(0.0, 0.0, 0.0)
        if stored == "int8":
            codes.append(shares.round().to(torch.int8).view(torch.uint8))
        else:
            codes.append(shares.to(torch.float8_e4m3fn).view(torch.uint8))
        scales.append(scale)
    return torch.cat(codes, dim=-1), torch.stack(scales, dim=-1)


def _scale(largest: torch.Tensor, largest_code: float) -> torch.Tensor:
    """Return the bfloat16 scales of rows whose largest magnitudes are given, NaN if that isn't finite."""
    exact = (largest / largest_code).clamp_min(MIN_SCALE).nan_to_num(MIN_SCALE, MIN_SCALE)
    rounded_up = (exact.view(torch.int32) + 0xFFFF) >> 16
    scale = rounded_up.to(torch.int16).view(torch.bfloat16)
    return scale.masked_fill(~largest.isfinite(), float("nan"))


def decode(
    codes: torch.Tensor, scales: torch.Tensor, stored: StoredAs, dims: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Turn codes and scales as `encode` returns them into rows [..., D] of `dtype`."""
    numbers = codes.view(torch.int8 if stored == "int8" else torch.float8_e4m3fn).float()
    parts = [
        part * scales[..., index : index + 1].float()
        for index, part in enumerate(torch.split(numbers, list(dims), dim=-1))
    ]
    return torch.cat(parts, dim=-1).to(dtype)


class LayerSource(Protocol):
    """A source of rows of KV: a `DeviceKV`, or blocks of one layer that came from elsewhere."""

    @property
    def layout(self) -> KVLayout:
        """Return the layout of a block."""

    def layer(self, index: int, /) -> torch.Tensor:
        """Return a layer of all blocks; see `DeviceKV.layer`."""


class KVRows:
    """Keys or values of one layer in all blocks, written and read as rows of the model's dtype."""

    def __init__(self, kv: LayerSource, layer: int, part: int, dim: int) -> None:
        """`dim` is the length of a row; the layout may have room for more."""
        self._layout: KVLayout = kv.layout
        self._part = kv.layer(layer)[:, part]
        self._dim = dim

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows [T, heads, dim] at tokens `offsets` [T] of `blocks` [T]."""
        layout = self._layout
        if layout.stored == "plain":
            self._put(blocks, offsets, rows)
            return
        codes, scales = encode(rows, layout.stored, self._dims())
        written = rows.new_zeros(len(rows), layout.row_bytes, dtype=torch.uint8)
        self._codes(written)[..., : self._dim] = codes
        self._scales(written).copy_(scales.flatten(1).view(torch.uint8))
        self._put(blocks, offsets, written)

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the rows of blocks [...] as [..., block_size, heads, dim]."""
        layout = self._layout
        if layout.stored == "plain" and not layout.tiled:
            return self._part[..., : self._dim][blocks]
        rows = self._part[blocks]
        if layout.tiled:
            rows = rows.transpose(-3, -2).flatten(-2)
        if layout.stored == "plain":
            return rows[..., None, : self._dim].contiguous()
        scales = self._scales(rows).contiguous().view(torch.bfloat16)
        scales = scales.view(*rows.shape[:-1], layout.num_kv_heads, layout.num_scales)
        dtype = TORCH_DTYPES[layout.dtype]
        return decode(self._codes(rows)[..., : self._dim], scales, layout.stored, self._dims(), dtype)

    def _put(self, blocks: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows as they are stored: [T, heads, dim] numbers or [T, row_bytes] codes and scales."""
        if not self._layout.tiled:
            part = self._part if rows.ndim == 2 else self._part[..., : self._dim]
            part.index_put_((blocks, offsets), rows)
            return
        rows = rows.flatten(1)
        rows = F.pad(rows, (0, -rows.shape[1] % COLUMNS)).view(len(rows), -1, COLUMNS)
        self._part[:, : rows.shape[1]].transpose(1, 2).index_put_((blocks, offsets), rows)

    def _codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the codes in contiguous rows [..., row_bytes] as [..., heads, head_dim], a view."""
        heads, dim = self._layout.num_kv_heads, self._layout.head_dim
        return rows[..., : heads * dim].view(*rows.shape[:-1], heads, dim)

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the scales in rows [..., row_bytes], a view."""
        layout = self._layout
        num_bytes = layout.num_kv_heads * layout.num_scales * SCALE_BYTES
        return rows[..., layout.scale_offset : layout.scale_offset + num_bytes]

    def _dims(self) -> tuple[int, ...]:
        rank = self._layout.latent_rank
        return (rank, self._dim - rank) if rank else (self._dim,)
