"""Several quantized weights that are multiplied with the same inputs, brought into one form.

Layers join query, key and value into one product, and gate and up share their quantized inputs. Files may
quantize them differently (GGUF's mixtures): then codes keep their values and what holds them widens, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from stemma.model.weights import multiples
from stemma.model.weights.fields import bytes_of
from stemma.model.weights.multiples import GroupNumbers, Multiples, numbers_of
from stemma.model.weights.quantized import QuantizedWeight


def alike(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Return the weights with the same bits, groups, offsets and treatment of activations.

    If they treat activations differently, activations stay as they are for all of them: nothing is lost.
    """
    if len(weights) == 1 and weights[0].zero_points is None:
        return list(weights)
    schemes = {(w.activations, w.activation_scale, w.activation_zero_point) for w in weights}
    if len(schemes) > 1:
        weights = [weight.weight_only() for weight in weights]
    weights = _with_like_codes(weights)
    group_size = math.gcd(*(weight.group_size for weight in weights))
    scales = [multiples.repeated(w.scales, w.group_size // group_size) for w in weights]
    offsets = [_offsets(w, w.group_size // group_size) for w in weights]
    if any(weight.has_offsets for weight in weights):
        together = multiples.alike([*scales, *offsets])
        scales, minimums = together[: len(scales)], list[GroupNumbers | None](together[len(scales) :])
    else:
        scales, minimums = multiples.alike(scales), [None] * len(scales)
    return [
        replace(weight, group_size=group_size, scales=factors, zero_points=None, minimums=added)
        for weight, factors, added in zip(weights, scales, minimums, strict=True)
    ]


def below_each_other(weights: Sequence[QuantizedWeight], order: torch.Tensor) -> QuantizedWeight:
    """Return weights of one form as one, with their outputs in this order."""
    zero_points = [weight.zero_points for weight in weights if weight.zero_points is not None]
    minimums = [weight.minimums for weight in weights if weight.minimums is not None]
    return replace(
        weights[0],
        codes=torch.cat([bytes_of(weight.codes) for weight in weights]),
        scales=multiples.below_each_other([weight.scales for weight in weights]),
        zero_points=torch.cat(zero_points) if zero_points else None,
        minimums=multiples.below_each_other(minimums) if minimums else None,
    ).reordered(order)


def _with_like_codes(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Return the weights with codes of the same bits and signs, and of the same levels or of none."""
    tables = {None if w.levels is None else tuple(w.levels.tolist()) for w in weights}
    if len(tables) > 1:
        weights = [weight.without_levels() for weight in weights]
    bits = max(weight.bits for weight in weights)
    if len({weight.is_unsigned for weight in weights}) > 1:
        weights = [_signed(weight, bits) for weight in weights]
    return [replace(weight, bits=bits) for weight in weights]


def _signed(weight: QuantizedWeight, bits: int) -> QuantizedWeight:
    """Return a weight whose codes may be negative."""
    if not weight.is_unsigned:
        return weight
    if weight.bits < bits:  # they fit as they are
        return replace(weight, is_unsigned=False, bits=bits)
    half = 1 << (bits - 1)
    moved = numbers_of(weight.scales) * half
    offsets = weight.offsets()
    return replace(
        weight,
        codes=bytes_of(weight.codes) - half,
        is_unsigned=False,
        zero_points=None,
        minimums=moved if offsets is None else moved + offsets,
    )


def _offsets(weight: QuantizedWeight, times: int) -> GroupNumbers:
    """Return what is added in groups so many times smaller; zeros in the scales' form for nothing."""
    offsets = weight.minimums if weight.zero_points is None else weight.offsets()
    if offsets is None:
        scales = weight.scales
        if isinstance(scales, Multiples):
            offsets = Multiples(torch.zeros_like(scales.integers), torch.zeros_like(scales.units))
        else:
            offsets = torch.zeros_like(scales)
    return multiples.repeated(offsets, times)
