"""Several quantized weights that are multiplied with the same inputs, brought into one form.

Layers join query, key and value into one product, and gate and up share their quantized inputs. Files may
quantize them differently (GGUF's mixtures): then codes keep their values and what holds them widens, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from stemma.model.weights.quantized import QuantizedWeight


def alike(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Return the weights with the same bits, groups, offsets and treatment of activations.

    If they treat activations differently, activations stay as they are for all of them: nothing is lost.
    """
    bits = max(weight.bits for weight in weights)
    group_size = math.gcd(*(weight.group_size for weight in weights))
    has_offsets = any(weight.offsets() is not None for weight in weights)
    schemes = {(w.activations, w.activation_scale, w.activation_zero_point) for w in weights}
    if len(schemes) > 1:
        weights = [weight.weight_only() for weight in weights]
    return [
        replace(
            weight,
            bits=bits,
            group_size=group_size,
            scales=_repeated(weight.scales, weight.group_size // group_size),
            zero_points=None,
            minimums=_offsets(weight, group_size) if has_offsets else None,
        )
        for weight in weights
    ]


def below_each_other(weights: Sequence[QuantizedWeight], order: torch.Tensor) -> QuantizedWeight:
    """Return weights of one form as one, with their outputs in this order."""

    def join(name: str) -> torch.Tensor | None:
        parts = [getattr(weight, name) for weight in weights]
        return None if parts[0] is None else torch.cat(parts)[order]

    names = ("codes", "scales", "zero_points", "minimums")
    return replace(weights[0], **{name: join(name) for name in names})  # type: ignore[arg-type]


def _offsets(weight: QuantizedWeight, group_size: int) -> torch.Tensor:
    offsets = weight.offsets()
    offsets = torch.zeros_like(weight.scales) if offsets is None else offsets
    return _repeated(offsets, weight.group_size // group_size)


def _repeated(values: torch.Tensor, times: int) -> torch.Tensor:
    return values if times == 1 else values.repeat_interleave(times, 1)
