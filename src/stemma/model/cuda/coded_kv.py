"""KV of a layer as the kernels take it: plain numbers, or codes with scales behind them."""

from __future__ import annotations

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout

_STORED = {"plain": 0, "int8": 1, "fp8": 2}


def rows_of(kv: DeviceKV, layer: int) -> torch.Tensor:
    """Return the numbers or codes of a layer, [blocks, parts, block_size, heads, dim]; a view."""
    rows, layout = kv.layer(layer), kv.layout
    if layout.stored == "plain":
        return rows
    heads, dim = layout.num_kv_heads, layout.head_dim
    return rows[..., : heads * dim].view(*rows.shape[:-1], heads, dim)


def stored_constants(layout: KVLayout) -> dict[str, int]:
    """Return what kernels that read or write KV are compiled for."""
    is_coded = layout.stored != "plain"
    return {"STORED": _STORED[layout.stored], "SCALES_AT": layout.scale_offset if is_coded else 0}
