"""Forms of a layer's packed weights: plain, quantized in the checkpoint, or quantized here.

One object says so for all places that pack. Weights that a checkpoint holds quantized stay so. With
`--quantize`, plain ones of linear layers and experts are rounded; not rounded are the weights of routers and
the projections of a cached latent, which are small, and embeddings that no output head shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from stemma.model.cpu.codes import can_pack_codes
from stemma.model.cpu.weights import PackedProduct
from stemma.model.weights.joining import alike, below_each_other
from stemma.model.weights.named import Affine, Weight
from stemma.model.weights.quantized import QuantizedWeight
from stemma.model.weights.rounding import RoundInputs, RoundToNearest, quantize
from stemma.native.library import Kernels

HEAD_BITS = 8
"""Bits of an output head, also where layers have 4: an error there goes straight into the logits."""


class Packing:
    """Packs a model's weights for the kernels."""

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        how: RoundToNearest | RoundInputs | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Pack for inputs of `dtype`; `how` plain weights, or inputs of quantized ones, are rounded.

        `num_threads`: of `PackedProduct`.
        """
        self.kernels = kernels
        self._num_threads = num_threads
        self._dtype = dtype
        self._how = how if isinstance(how, RoundToNearest) else None
        self._inputs = how if isinstance(how, RoundInputs) else None
        self.fewest_bits: int | None = None
        """Of the weights packed so far; None: all are plain."""
        self.num_quantized = 0
        """Weights packed as codes so far."""
        self.saved_bytes = 0
        """Memory that codes and compressed weights take less than plain ones."""

    def linears(self, *layers: Affine, order: Sequence[int] | None = None) -> PackedProduct:
        """Return one product that computes those of several layers, side by side; all or none have a bias.

        `order`: which of their outputs, one after the other; None: all, as they are.
        """
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        weights = self._in_one_form(layers)
        if order is None:
            return self.product(weights, bias)
        chosen = torch.tensor(order)
        return self.product([joined(weights, chosen)], None if bias is None else bias[chosen])

    def side_by_side(self, *layers: Affine) -> list[PackedProduct]:
        """Return a product for each of the layers, which share their inputs."""
        weights = self._in_one_form(layers)
        return [self.product([w], one.bias) for w, one in zip(weights, layers, strict=True)]

    def head(self, head: Affine) -> PackedProduct:
        """Return the output head's product."""
        how = None if self._how is None else replace(self._how, bits=HEAD_BITS)
        return self.product([self._weight(head.weight, how)], head.bias)

    def experts(
        self, gates: Sequence[Affine], ups: Sequence[Affine], downs: Sequence[Affine]
    ) -> list[tuple[PackedProduct, PackedProduct, PackedProduct]]:
        """Return the products of all experts of a layer: gate, up and down of each."""
        inner, outer = self._in_one_form((*gates, *ups)), self._in_one_form(downs)
        biases = [layer.bias for layer in (*gates, *ups, *downs)]
        products = [self.product([w], bias) for w, bias in zip((*inner, *outer), biases, strict=True)]
        count = len(gates)
        return list(zip(products[:count], products[count : 2 * count], products[2 * count :], strict=True))

    def tensor(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedProduct:
        """Return the product of a weight that checkpoints never hold quantized."""
        return self.product([self._weight(weight, self._how)], bias)

    def plain(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedProduct:
        """Return the product of a weight that is never rounded."""
        return PackedProduct(self.kernels, [weight], bias)

    def product(self, weights: Sequence[Weight], bias: torch.Tensor | None = None) -> PackedProduct:
        """Pack weights of one form below each other."""
        product = PackedProduct(self.kernels, weights, bias, self._dtype, self._num_threads)
        for weight in weights:
            if isinstance(weight, QuantizedWeight):
                self.num_quantized += 1
                self.fewest_bits = min(self.fewest_bits or weight.bits, weight.bits)
        if isinstance(weights[0], QuantizedWeight) or product.is_compressed:
            self.saved_bytes += sum(weight.shape.numel() for weight in weights) * self._dtype.itemsize
            self.saved_bytes -= product.num_bytes
        return product

    def _in_one_form(self, layers: Sequence[Affine]) -> list[Weight]:
        return in_one_form([self._weight(layer.weight, self._how) for layer in layers])

    def _weight(self, weight: Weight, how: RoundToNearest | None) -> Weight:
        quantized = weight if isinstance(weight, QuantizedWeight) else None
        if isinstance(weight, torch.Tensor) and how is not None:
            quantized = quantize(weight.detach(), how)
        if quantized is None:
            return weight
        if self._inputs is not None:
            quantized = self._inputs.apply(quantized)
        return quantized if can_pack_codes(quantized) else quantized.dequantize(self._dtype)


def joined(weights: Sequence[Weight], order: torch.Tensor) -> Weight:
    """Return weights of one form below each other, with their outputs in this order."""
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if plain:
        return torch.cat(plain)[order]
    return below_each_other([weight for weight in weights if isinstance(weight, QuantizedWeight)], order)


def in_one_form(weights: Sequence[Weight]) -> list[Weight]:
    """Return weights that share inputs all quantized alike, or all plain if one of them is."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    plain = next((weight for weight in weights if isinstance(weight, torch.Tensor)), None)
    if plain is None:
        return list(alike(quantized))
    return [w.dequantize(plain.dtype) if isinstance(w, QuantizedWeight) else w for w in weights]
