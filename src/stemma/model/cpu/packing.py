"""What a layer's weights become as they are packed: plain, quantized in the checkpoint, or quantized here.

One object says so for all places that pack. Weights that a checkpoint holds quantized stay so. With
`--quantize`, plain ones of linear layers and experts are rounded; not rounded are the weights of routers and
the projections of a cached latent, which are small, and embeddings that no output head shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from stemma.model.cpu.codes import can_pack_codes
from stemma.model.cpu.weights import PackedProduct
from stemma.model.quantization.attach import attached
from stemma.model.quantization.joining import alike
from stemma.model.quantization.quantize import RoundInputs, RoundToNearest, quantize
from stemma.model.quantization.weights import QuantizedWeight
from stemma.native.library import Kernels

Weight: TypeAlias = torch.Tensor | QuantizedWeight
HEAD_BITS = 8
"""Of an output head, also where layers have 4: an error there goes straight into the logits."""


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

    def linears(self, *linears: Any) -> PackedProduct:
        """Return one product that computes those of several layers, side by side."""
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        return self.product(self._of(linears), bias)

    def side_by_side(self, *linears: Any) -> list[PackedProduct]:
        """Return a product for each of the layers, which share their inputs."""
        weights = self._of(linears)
        return [self.product([w], one.bias) for w, one in zip(weights, linears, strict=True)]

    def head(self, head: Any, embedding: Any = None) -> PackedProduct:
        """Return the output head's product; its rows are the embeddings if `embedding` is tied to it."""
        how = None if self._how is None else replace(self._how, bits=HEAD_BITS)
        stored = attached(head) or (attached(embedding) if embedding is not None else None)
        return self.product([self._weight(head.weight.detach(), stored, how)], head.bias)

    def experts(self, module: Any, **parts: torch.Tensor) -> dict[str, list[PackedProduct]]:
        """Return the products of all experts of a module by part; the parts share their inputs.

        `parts` are the plain weights, [E, n, k] each, by the names that checkpoints give them in quantized
        form: `3.up_proj.weight` is expert 3's `up_proj`.
        """
        names = [(number, name) for name, stacked in parts.items() for number in range(len(stacked))]
        weights = in_one_form(
            [
                self._weight(
                    parts[name][number].detach(), attached(module, f"{number}.{name}.weight"), self._how
                )
                for number, name in names
            ]
        )
        products: dict[str, list[PackedProduct]] = {name: [] for name in parts}
        for (_, name), weight in zip(names, weights, strict=True):
            products[name].append(self.product([weight]))
        return products

    def tensor(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedProduct:
        """Return the product of a weight that checkpoints never hold quantized."""
        return self.product([self._weight(weight, None, self._how)], bias)

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

    def _of(self, linears: Sequence[Any]) -> list[Weight]:
        return in_one_form([self._weight(one.weight.detach(), attached(one), self._how) for one in linears])

    def _weight(
        self, plain: torch.Tensor, stored: QuantizedWeight | None, how: RoundToNearest | None
    ) -> Weight:
        if stored is None and how is not None:
            stored = quantize(plain, how)
        if stored is None:
            return plain
        if self._inputs is not None:
            stored = self._inputs.apply(stored)
        return stored if can_pack_codes(stored) else stored.dequantize(self._dtype)


def in_one_form(weights: Sequence[Weight]) -> list[Weight]:
    """Return weights that share inputs all quantized alike, or all plain if one of them is."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    plain = next((weight for weight in weights if isinstance(weight, torch.Tensor)), None)
    if plain is None:
        return list(alike(quantized))
    return [w.dequantize(plain.dtype) if isinstance(w, QuantizedWeight) else w for w in weights]
