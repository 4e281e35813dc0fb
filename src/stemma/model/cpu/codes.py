"""Packs quantized weights into the strips that the kernels read (native/quantized.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from stemma.model.cpu.weight_memory import weight_memory
from stemma.model.weights.joining import alike
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from stemma.native.library import Kernels
from stemma.native.structures import Codes, PackCodesArgs, Strips

_SCHEMES = {
    ActivationScheme.NONE: 0,
    ActivationScheme.DYNAMIC_TOKEN: 1,
    ActivationScheme.STATIC_TENSOR: 2,
    ActivationScheme.DYNAMIC_GROUP: 3,
}


def can_pack_codes(weight: QuantizedWeight) -> bool:
    """Whether the kernels take this weight: groups are multiples of eight inputs."""
    return weight.group_size % 8 == 0


def _held_bits(weight: QuantizedWeight) -> int:
    """Return how many bits a code takes: groups are whole lines of what lies beyond the lower four."""
    if weight.bits == 5 and weight.group_size % 32 == 0:
        return 5
    if weight.bits in (5, 6):
        return 6 if weight.group_size % 16 == 0 else 8
    return weight.bits


class PackedCodes:
    """Quantized weights below each other, packed."""

    def __init__(
        self, kernels: Kernels, weights: Sequence[QuantizedWeight], bias: torch.Tensor | None
    ) -> None:
        """Pack `weights`, [n_i, in_features] each; `bias`: [sum of n_i]."""
        weights = alike(weights)
        first = weights[0]
        bits = _held_bits(first)
        scales = [weight.scales for weight in weights]
        offsets = [weight.minimums for weight in weights if weight.minimums is not None]
        dtype = torch.float16 if _fit_half([*scales, *offsets]) else torch.float32
        self.bias = _bias(weights, bias)
        self.strips = Strips(
            None,
            None if self.bias is None else self.bias.data_ptr(),
            sum(weight.shape[0] for weight in weights),
            first.shape[1],
            Codes(
                bits,
                1 << (bits - 1),
                first.group_size,
                dtype.itemsize,
                bool(offsets),
                _SCHEMES[first.activations],
                first.activation_scale or 0.0,
                first.activation_zero_point,
            ),
        )
        self.room = weight_memory(kernels.packed_bytes(ctypes.addressof(self.strips), False))
        self.strips.data = self.room.data_ptr()
        at = 0
        for weight in weights:
            codes, factors = weight.codes.contiguous(), weight.scales.to(dtype).contiguous()
            added = None if weight.minimums is None else weight.minimums.to(dtype).contiguous()
            args = PackCodesArgs(
                codes.data_ptr(),
                factors.data_ptr(),
                None if added is None else added.data_ptr(),
                weight.shape[0],
                at,
                self.strips,
                torch.get_num_threads(),
            )
            kernels.pack_codes(ctypes.addressof(args))
            at += weight.shape[0]


def _fit_half(tensors: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(values.half().float(), values) for values in tensors)


def _bias(weights: Sequence[QuantizedWeight], bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return the bias in float32, with what a zero point of the inputs adds to every product taken off it."""
    zero = weights[0].activation_zero_point * (weights[0].activation_scale or 0.0)
    plain = None if bias is None else bias.detach().float().contiguous()
    if zero == 0:
        return plain
    surplus = zero * torch.cat([weight.dequantize(torch.float32).sum(1) for weight in weights])
    return -surplus if plain is None else plain - surplus
