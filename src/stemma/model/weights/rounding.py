"""Round to nearest: from a plain weight to a quantized one, without data.

8 bits are symmetric: a group's scale is its largest absolute value / 127. 4 bits have only 16 codes, which
span the group's smallest to its largest value, as GGUF's Q4_1 does. Scales are rounded to half precision
before codes are chosen, so that nothing is lost when they are packed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from stemma.model.weights.quantized import SMALLEST_GROUP, ActivationScheme, QuantizedWeight

_SMALLEST_HALF = 6.2e-5
"""Below it half precision loses digits: then scales stay in float32."""
_CHUNK_ELEMENTS = 3 << 16
"""In float32 less than the megabyte from which malloc maps fresh pages while weights load (`process_memory`):
faulting those in took nine tenths of the time."""
_VERSION = 2
"""Changes with anything that changes codes, scales or which weights are rounded."""


@dataclass(frozen=True, slots=True)
class RoundToNearest:
    """How plain weights are quantized as they are loaded."""

    bits: int
    """8 or 4."""
    group_size: int
    """Inputs of an output that share a scale, where that divides a weight's inputs; see `fitting_group`."""

    def fingerprint(self, plain: str) -> str:
        """Return the fingerprint of a checkpoint whose own one is `plain` once it is rounded so."""
        return hashlib.sha256(
            f"{plain} rounded {_VERSION} {self.bits} {self.group_size}".encode()
        ).hexdigest()


def round_to_nearest(bits: int, group_size: int | None) -> RoundToNearest:
    """Return how to round to `bits`; without a group size, in the one that suits them."""
    return RoundToNearest(bits, group_size or (128 if bits == 8 else 32))


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """Weights stay as the checkpoint quantized them; inputs that it leaves as they are become int8 per group.

    It is how llama.cpp multiplies: integers with integers, a scale for each group on both sides.
    """

    def fingerprint(self, plain: str) -> str:
        """Return the fingerprint of a checkpoint whose own one is `plain` once it is served so."""
        return hashlib.sha256(f"{plain} inputs {_VERSION}".encode()).hexdigest()

    def apply(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Return the weight, multiplied with int8 inputs unless its checkpoint says how already."""
        if weight.activations is not ActivationScheme.NONE:
            return weight
        return replace(weight, activations=ActivationScheme.DYNAMIC_GROUP)


def fitting_group(num_inputs: int, group_size: int) -> int | None:
    """Return the largest of group_size, group_size / 2, ... 16 that divides `num_inputs`; None: none does."""
    while group_size >= SMALLEST_GROUP:
        if num_inputs % group_size == 0:
            return group_size
        group_size //= 2
    return None


def quantize(weight: torch.Tensor, how: RoundToNearest) -> QuantizedWeight | None:
    """Quantize [num_outputs, num_inputs]; activations become int8 per group. None: no group fits."""
    group_size = fitting_group(weight.shape[1], how.group_size)
    if group_size is None:
        return None
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs, inputs // group_size)
    minimums = torch.empty_like(scales) if how.bits == 4 else None
    step = max(1, _CHUNK_ELEMENTS // inputs)
    for first in range(0, outputs, step):  # in float32, and small enough for the caches
        part = slice(first, first + step)
        grouped = weight[part].float().view(-1, inputs // group_size, group_size)
        if minimums is None:
            scales[part] = _rounded(grouped.abs().amax(-1) / 127)
            offset = None
        else:
            lowest, highest = torch.aminmax(grouped, dim=-1)
            scales[part] = _rounded((highest - lowest) / 15)
            minimums[part] = _rounded(lowest + 8 * scales[part])
            offset = minimums[part]
        codes[part] = _codes(grouped, scales[part], offset, how.bits).view(-1, inputs)
    return QuantizedWeight(
        codes=codes,
        scales=scales,
        zero_points=None,
        bits=how.bits,
        group_size=group_size,
        activations=ActivationScheme.DYNAMIC_GROUP,
        minimums=minimums,
    )


def _codes(
    grouped: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, bits: int
) -> torch.Tensor:
    if minimums is not None:
        grouped = grouped - minimums[..., None]
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    limit = 1 << (bits - 1)
    return (grouped * inverse[..., None]).round_().clamp_(-limit, limit - 1).to(torch.int8)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Return the values in half precision, as float32; unchanged where it has no room for them."""
    sizes = values.abs()
    if bool(((sizes < _SMALLEST_HALF) & (sizes > 0)).any()) or bool((sizes > 6e4).any()):
        return values
    return values.half().float()
