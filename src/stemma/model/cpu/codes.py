"""Packs quantized weights into the strips that the kernels read (native/quantized.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stemma.model.cpu.weight_memory import weight_memory
from stemma.model.weights.fields import Codes, PackedFields, bytes_of
from stemma.model.weights.joining import alike
from stemma.model.weights.multiples import GroupNumbers, Multiples, numbers_of
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from stemma.native.library import Kernels
from stemma.native.structures import CodeFields, PackCodesArgs, Strips
from stemma.native.structures import Codes as CodesArgs

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
        offsets = [weight.minimums for weight in weights if weight.minimums is not None]
        packed = _packed_numbers([*(weight.scales for weight in weights), *offsets])
        scales, added = packed[: len(weights)], packed[len(weights) :]
        bits = _held_bits(first)
        self.bias = _bias(weights, bias)
        self._levels = None if first.levels is None else first.levels.contiguous()
        self.strips = Strips(
            None,
            None if self.bias is None else self.bias.data_ptr(),
            sum(weight.shape[0] for weight in weights),
            first.shape[1],
            CodesArgs(
                None if self._levels is None else self._levels.data_ptr(),
                bits,
                _middle(first, bits),
                first.group_size,
                scales[0].itemsize,
                scales[0].groups_of_unit,
                bool(added),
                _SCHEMES[first.activations],
                first.activation_scale or 0.0,
                first.activation_zero_point,
            ),
        )
        self.room = weight_memory(kernels.packed_bytes(ctypes.addressof(self.strips), False))
        self.strips.data = self.room.data_ptr()
        at = 0
        for number, weight in enumerate(weights):
            factors = scales[number]
            minimums = added[number] if added else _PackedNumbers(None, None)
            where, codes = _places(weight)
            args = PackCodesArgs(
                *where,
                *factors.places(),
                *minimums.places(),
                weight.shape[0],
                at,
                self.strips,
                torch.get_num_threads(),
            )
            kernels.pack_codes(ctypes.addressof(args))
            del codes
            at += weight.shape[0]


def _places(weight: QuantizedWeight) -> tuple[tuple[int | None, CodeFields, CodeFields], Codes]:
    """Return where the kernels find codes, and what has to stay for so long."""
    codes, nothing = weight.codes, CodeFields()
    if isinstance(codes, PackedFields):
        block, group = codes.low.count, weight.group_size
        if max(block, group) % min(block, group) == 0:
            low, *high = codes.places()
            return (None, low, high[0] if high else nothing), codes
    codes = bytes_of(codes).contiguous()
    return (codes.data_ptr(), nothing, nothing), codes


def _middle(weight: QuantizedWeight, bits: int) -> int:
    """Return what is added to a code, or to the level it stands for, so that it isn't negative."""
    if weight.levels is not None:
        return -int(weight.levels.min())
    return 0 if weight.is_unsigned else 1 << (bits - 1)


@dataclass(frozen=True, slots=True)
class _PackedNumbers:
    """Scales or minimums as the kernels take them."""

    values: torch.Tensor | None
    """[num_outputs, num_groups]: float32, float16, or int8 times units; None: there are none."""
    units: torch.Tensor | None
    """float16 [num_outputs, num_groups // groups_of_unit]."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number; 0 where there are none."""
        return 0 if self.values is None else self.values.itemsize

    @property
    def groups_of_unit(self) -> int:
        """How many groups share a unit; 1 where there are none."""
        if self.values is None or self.units is None:
            return 1
        return self.values.shape[1] // self.units.shape[1]

    def places(self) -> tuple[int | None, int | None]:
        """Return where values and units lie; valid as long as this object."""
        parts = (self.values, self.units)
        values, units = (None if part is None else part.data_ptr() for part in parts)
        return values, units


def _packed_numbers(numbers: Sequence[GroupNumbers]) -> list[_PackedNumbers]:
    """Return numbers of several weights in one form, the smallest that holds all of them exactly."""
    multiples = [each for each in numbers if isinstance(each, Multiples)]
    if len(multiples) == len(numbers) and _fit_half([each.units for each in multiples]):
        return [_PackedNumbers(m.integers.contiguous(), m.units.half().contiguous()) for m in multiples]
    plain = [numbers_of(each) for each in numbers]
    dtype = torch.float16 if _fit_half(plain) else torch.float32
    return [_PackedNumbers(values.to(dtype).contiguous(), None) for values in plain]


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
