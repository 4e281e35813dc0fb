"""Adapters of a fused decoder: packed, and described to the one call of a step (native/low_rank.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from stemma.model.cpu.fused_layer import FusedLayer, Gated
from stemma.model.cpu.weights import PackedProduct
from stemma.model.lora.adapter import Adapter, AdapterRows, LinearShape, LowRankPair
from stemma.native.library import AdapterLayerArgs, AdapterRowsArgs, Kernels, LowRankArgs

_ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
_GATED = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
"""Names of transformers' layers -> fields of `AdapterLayer`."""


class PackedAdapter:
    """An adapter's matrices as the kernels read them."""

    def __init__(self, kernels: Kernels, adapter: Adapter, num_layers: int, dtype: torch.dtype) -> None:
        self._products: list[PackedProduct] = []  # the structures point into them
        self.layers = (AdapterLayerArgs * num_layers)()
        """Where the kernels find them; valid as long as this object."""
        for index in range(num_layers):
            for name, field in _fields(index).items():
                if (pair := adapter.pairs.get(name)) is not None:
                    setattr(self.layers[index], field, self._pack(kernels, pair, dtype))

    def _pack(self, kernels: Kernels, pair: LowRankPair, dtype: torch.dtype) -> LowRankArgs:
        down, up = (PackedProduct(kernels, [matrix]) for matrix in pair.ready(dtype))
        self._products += (down, up)
        return LowRankArgs(down.strips, up.strips, pair.scale)


def adaptable(
    layers: Sequence[FusedLayer], num_heads: int, num_kv_heads: int, head_dim: int
) -> dict[str, LinearShape]:
    """Return the linear layers that adapters may add to: all but those of experts and their routers."""
    heads, kv_heads = num_heads * head_dim, num_kv_heads * head_dim
    found: dict[str, LinearShape] = {}
    for index, layer in enumerate(layers):
        hidden = layer.qkv.in_features
        shapes = {
            "query": LinearShape(heads, hidden),
            "key": LinearShape(kv_heads, hidden),
            "value": LinearShape(kv_heads, hidden),
            "output": LinearShape(layer.output.out_features, layer.output.in_features),
        }
        if isinstance(layer.mlp, Gated):
            for field in _GATED.values():
                product = getattr(layer.mlp, field)
                shapes[field] = LinearShape(product.out_features, product.in_features)
        found |= {name: shapes[field] for name, field in _fields(index).items() if field in shapes}
    return found


def describe_rows(adapters: Sequence[AdapterRows]) -> ctypes.Array[AdapterRowsArgs]:
    """Return a batch's adapters as the kernels want them."""
    rows = (AdapterRowsArgs * len(adapters))()
    for described, each in zip(rows, adapters, strict=True):
        assert isinstance(each.prepared, PackedAdapter)
        described.layers = ctypes.addressof(each.prepared.layers)
        described.begin, described.end = each.rows
        described.first_logit, described.last_logit = each.logits
    return rows


def _fields(index: int) -> dict[str, str]:
    layer = f"model.layers.{index}"
    return {f"{layer}.self_attn.{name}": field for name, field in _ATTENTION.items()} | {
        f"{layer}.mlp.{name}": field for name, field in _GATED.items()
    }
