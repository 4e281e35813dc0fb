"""Adapters of a fused decoder: packed, and described to the one call of a step (native/low_rank.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence

import torch

from stemma.model.cpu.weights import PackedProduct
from stemma.model.families.layout import Layer, Linear, Mixture, ModelLayout
from stemma.model.lora.adapter import Adapter, AdapterRows, LinearShape, LowRankPair
from stemma.native.library import Kernels
from stemma.native.structures import AdapterLayerArgs, AdapterRowsArgs, LowRankArgs


class PackedAdapter:
    """An adapter's matrices as the kernels read them."""

    def __init__(self, kernels: Kernels, adapter: Adapter, layout: ModelLayout, dtype: torch.dtype) -> None:
        self._products: list[PackedProduct] = []  # the structures point into them
        self.layers = (AdapterLayerArgs * len(layout.layers))()
        """Where the kernels find them; valid as long as this object."""
        for described, layer in zip(self.layers, layout.layers, strict=True):
            for field, pair in _pairs_of(layer, adapter.pairs):
                setattr(described, field, self._pack(kernels, pair, dtype))

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
        for linear in (*layer.inputs, *(linear for _, linear in _alone(layer))):
            rows = linear.outputs if linear.piece is None else linear.piece.shape[0]
            found[linear.name] = LinearShape(rows, linear.inputs)
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


def _pairs_of(layer: Layer, pairs: Mapping[str, LowRankPair]) -> Iterator[tuple[str, LowRankPair]]:
    """Yield fields of `AdapterLayer` and what an adapter has for them."""
    if layer.order is None and layer.recurrent is None:
        for field, linear in zip(("query", "key", "value"), layer.inputs, strict=False):
            if linear.name in pairs:
                yield field, pairs[linear.name]
    elif (joined := joined_pairs(layer.inputs, pairs, layer.order)) is not None:
        yield "query", joined
    for field, linear in _alone(layer):
        if (pair := pairs.get(linear.name)) is not None:
            yield field, _rows_of(pair, linear)


def _alone(layer: Layer) -> Iterator[tuple[str, Linear]]:
    """Yield fields of `AdapterLayer`, and layers that are products of their own."""
    yield "output", layer.output
    if layer.latent is not None and layer.latent.expand is not None:
        yield "expand", layer.latent.expand
    gated = layer.mlp.shared if isinstance(layer.mlp, Mixture) else layer.mlp
    if gated is not None:
        yield from (("gate", gated.gate), ("up", gated.up), ("down", gated.down))


def _rows_of(pair: LowRankPair, linear: Linear) -> LowRankPair:
    """Return what is added to a layer's own outputs, of those of the tensor that it is a piece of."""
    if linear.piece is None:
        return pair
    first = linear.piece.first_row
    return LowRankPair(pair.down, pair.up[first : first + linear.outputs], pair.scale)


def joined_pairs(
    linears: Sequence[Linear], pairs: Mapping[str, LowRankPair], order: Sequence[int] | None = None
) -> LowRankPair | None:
    """Return what is added to all of these layers, in this order of rows; None: nothing is."""
    downs, ups, first = [], [], 0
    rows = sum(linear.outputs for linear in linears)
    for linear in linears:
        if (found := pairs.get(linear.name)) is not None:
            pair = _rows_of(found, linear)
            up = torch.zeros(rows, pair.up.shape[1])
            up[first : first + linear.outputs] = pair.up.float() * pair.scale
            downs.append(pair.down.float())
            ups.append(up)
        first += linear.outputs
    if not downs:
        return None
    whole = torch.cat(ups, dim=1)
    if order is not None:
        whole = whole[list(order)]
    return LowRankPair(torch.cat(downs), whole, 1.0)
