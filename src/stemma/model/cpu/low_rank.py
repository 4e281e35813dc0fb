"""Adapters of a fused decoder: packed, and described to the one call of a step (native/low_rank.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from stemma.model.cpu.weights import PackedProduct
from stemma.model.families.layout import Mixture, ModelLayout
from stemma.model.lora.adapter import Adapter, AdapterRows, LinearShape, LowRankPair
from stemma.native.library import Kernels
from stemma.native.structures import AdapterLayerArgs, AdapterRowsArgs, LowRankArgs

_ATTENTION = {
    **{"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"},
    **{"q_a_proj": "query", "q_b_proj": "expand", "kv_a_proj_with_mqa": "key"},
}
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


def adaptable(layout: ModelLayout) -> dict[str, LinearShape]:
    """Return the linear layers that adapters may add to: all but those of routed experts and their routers.

    Not the expansion of a cached latent either, which no step calls.
    """
    found: dict[str, LinearShape] = {}
    for layer in layout.layers:
        expand = None if layer.latent is None else layer.latent.expand
        gated = layer.mlp.shared if isinstance(layer.mlp, Mixture) else layer.mlp
        ends = () if gated is None else (gated.gate, gated.up, gated.down)
        # Inputs in another order, and those of a recurrent layer, aren't where an adapter adds.
        inputs = () if layer.order is not None or layer.recurrent is not None else layer.inputs
        output = () if layer.recurrent is not None else (layer.output,)
        for linear in (*inputs, *output, expand, *ends):
            if linear is not None:
                found[linear.name] = LinearShape(linear.outputs, linear.inputs)
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
        f"{layer}.{path}.{name}": field
        for path in ("mlp", "mlp.shared_experts", "mlp.shared_expert")
        for name, field in _GATED.items()
    }
