"""One quantized weight in memory, whatever file it came from.

Readers of checkpoints make it, `quantize.py` makes it from a plain weight, and `cpu/weights.py` packs it for
the kernels. A code c of output i and input j stands for

    scales[i, g] * (c - zero_points[i, g])   or   scales[i, g] * c + minimums[i, g],   g = j // group_size.

Formats whose zero is a code (GPTQ, AWQ, compressed-tensors) have zero points; those that add a float (GGUF's
Q4_1 and K-quants) have minimums; symmetric ones have neither. Where codes are looked up (GGUF's IQ4 and
MXFP4), c is what the table has for a code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from stemma.errors import ModelError
from stemma.model.weights import fields
from stemma.model.weights.fields import Codes, PackedFields, bytes_of
from stemma.model.weights.multiples import GroupNumbers, Multiples, numbers_of, rows_of

SMALLEST_GROUP = 16
"""Inputs; smaller groups would cost more for their scales than they save."""


class ActivationScheme(Enum):
    """The way in which a product with a quantized weight quantizes its inputs."""

    NONE = "none"
    """They stay as they are, and meet exact codes: a group's sum takes its scale in float32."""
    DYNAMIC_TOKEN = "dynamic_token"
    """int8, symmetric: each token's inputs are divided by their largest absolute value / 127."""
    DYNAMIC_GROUP = "dynamic_group"
    """As DYNAMIC_TOKEN, for each of the weight's groups of inputs: a few large ones coarsen only theirs."""
    STATIC_TENSOR = "static_tensor"
    """int8: round(input / scale) + zero point, clamped to [-128, 127]; both come with the weight."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [num_outputs, num_inputs] as integers and scales. Raises ModelError if parts don't fit."""

    codes: Codes
    """[num_outputs, num_inputs]: int8, a value a byte whatever its bits, or as the file packs them.

    Those of 4 bits are in [-8, 7] or [0, 15].
    """
    scales: GroupNumbers
    """[num_outputs, num_inputs // group_size]."""
    zero_points: torch.Tensor | None
    """int8, in the shape of scales; in the range of codes. None: zero."""
    bits: int
    """8, 6, 5 or 4."""
    group_size: int
    """Inputs of an output that share a scale; num_inputs where each output has one. Divides num_inputs."""
    activations: ActivationScheme
    activation_scale: float | None = None
    """Scale of inputs in STATIC_TENSOR."""
    activation_zero_point: int = 0
    """Zero point of inputs in STATIC_TENSOR, in [-128, 127]."""
    minimums: GroupNumbers | None = None
    """In the shape of scales; not together with zero points."""
    is_unsigned: bool = False
    """Whether codes of fewer than 8 bits begin with zero."""
    levels: torch.Tensor | None = None
    """int8 [16]: what unsigned codes of 4 bits stand for; None: for themselves."""

    def __post_init__(self) -> None:
        """Hold the parts against each other: they come from files."""
        self._check_shapes()
        if self.zero_points is not None and self.minimums is not None:
            raise ModelError("a quantized weight has zero points and minimums; it may have one of them")
        numbers = [values for values in (self.scales, self.minimums) if values is not None]
        floats = [values.units if isinstance(values, Multiples) else values for values in numbers]
        if not all(bool(torch.isfinite(values).all()) for values in floats):
            raise ModelError("a quantized weight has scales that are NaN or infinite")
        self._check_codes()
        if (self.activations is ActivationScheme.STATIC_TENSOR) != (self.activation_scale is not None):
            raise ModelError(
                "an activation scale goes with static quantization of activations, and only with it"
            )
        if self.activation_scale is not None and not 0 < self.activation_scale < float("inf"):
            raise ModelError(f"the scale of activations is {self.activation_scale}, must be positive")
        if not -128 <= self.activation_zero_point <= 127:
            raise ModelError(f"the zero point of activations is {self.activation_zero_point}, must fit int8")

    def _check_codes(self) -> None:
        is_table = self.levels is not None
        if is_table and (self.bits != 4 or not self.is_unsigned or self.zero_points is not None):
            raise ModelError("a quantized weight looks codes up that aren't unsigned of 4 bits")
        if self.levels is not None and (self.levels.shape != (16,) or self.levels.dtype != torch.int8):
            raise ModelError(f"a quantized weight has {list(self.levels.shape)} levels, must be 16 of int8")
        if self.bits == 8:
            if self.is_unsigned:
                raise ModelError("a quantized weight of 8 bits has unsigned codes; int8 doesn't hold them")
            return
        lowest = 0 if self.is_unsigned else -(1 << (self.bits - 1))
        highest = lowest + (1 << self.bits) - 1
        for values in (self.codes, self.zero_points):
            if isinstance(values, PackedFields):
                least, greatest = values.bounds
            elif values is None or not values.numel():
                continue
            else:
                least, greatest = map(int, values.aminmax())
            if not lowest <= least <= greatest <= highest:
                raise ModelError(
                    f"a quantized weight of {self.bits} bits has codes outside {lowest}..{highest}"
                )

    def _check_shapes(self) -> None:
        if self.bits not in (8, 6, 5, 4):
            raise ModelError(f"a weight is quantized to {self.bits} bits; 8, 6, 5 and 4 are served")
        codes = self.codes
        kind = torch.int8 if isinstance(codes, PackedFields) else codes.dtype
        if len(codes.shape) != 2 or 0 in codes.shape or kind != torch.int8:
            raise ModelError(f"quantized codes are {kind} {list(codes.shape)}, must be int8 [n, k]")
        outputs, inputs = codes.shape
        size = self.group_size
        if size < 1 or inputs % size or (size < SMALLEST_GROUP and size != inputs):
            raise ModelError(
                f"a quantized weight {[outputs, inputs]} has groups of {size}; they must divide its inputs "
                f"and have {SMALLEST_GROUP} or more"
            )
        expected = (outputs, inputs // size)
        for values, dtype in (
            (self.scales, torch.float32),
            (self.zero_points, torch.int8),
            (self.minimums, torch.float32),
        ):
            if values is not None and (values.shape != expected or values.dtype != dtype):
                raise ModelError(
                    f"a quantized weight {[outputs, inputs]} in groups of {size} has {values.dtype} "
                    f"{list(values.shape)} where {dtype} {list(expected)} is needed"
                )

    @property
    def shape(self) -> torch.Size:
        """[num_outputs, num_inputs]."""
        return self.codes.shape

    @property
    def has_offsets(self) -> bool:
        """Whether something is added to scales * codes."""
        return self.zero_points is not None or self.minimums is not None

    def offsets(self) -> torch.Tensor | None:
        """Return what is added to scales * codes, float32 [num_outputs, num_groups]; None: nothing."""
        if self.zero_points is not None:
            return -numbers_of(self.scales) * self.zero_points
        return None if self.minimums is None else numbers_of(self.minimums)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the plain weight [num_outputs, num_inputs], computed in float32 and rounded to `dtype`."""
        scales = numbers_of(self.scales)
        codes = bytes_of(self.codes)
        codes = codes if self.levels is None else self.levels[codes.int()]
        grouped = codes.view(*scales.shape, self.group_size).float()
        if self.zero_points is not None:
            grouped -= self.zero_points[..., None]
        grouped *= scales[..., None]
        if self.minimums is not None:
            grouped += numbers_of(self.minimums)[..., None]
        return grouped.view(self.shape).to(dtype)

    def weight_only(self) -> QuantizedWeight:
        """Return the same weight, multiplied with activations as they are."""
        return replace(
            self, activations=ActivationScheme.NONE, activation_scale=None, activation_zero_point=0
        )

    def rows(self, first: int, end: int) -> QuantizedWeight:
        """Return outputs [first, end): a view."""
        return self._of_rows(slice(first, end))

    def reordered(self, order: torch.Tensor) -> QuantizedWeight:
        """Return the outputs in another order."""
        return self._of_rows(order)

    def without_levels(self) -> QuantizedWeight:
        """Return the same weight with codes that stand for themselves."""
        if self.levels is None:
            return self
        codes = self.levels[bytes_of(self.codes).int()]
        return replace(self, codes=codes, bits=8, is_unsigned=False, levels=None)

    def _of_rows(self, chosen: slice | torch.Tensor) -> QuantizedWeight:
        return replace(
            self,
            codes=fields.of_rows(self.codes, chosen),
            scales=rows_of(self.scales, chosen),
            zero_points=None if self.zero_points is None else self.zero_points[chosen],
            minimums=None if self.minimums is None else rows_of(self.minimums, chosen),
        )
