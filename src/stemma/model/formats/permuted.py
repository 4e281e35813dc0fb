"""Weights whose groups are made of inputs that lie apart: GPTQ's `desc_act`."""

from __future__ import annotations

import torch

from stemma.errors import ModelError
from stemma.model.weights.fields import bytes_of
from stemma.model.weights.multiples import numbers_of
from stemma.model.weights.quantized import QuantizedWeight


def permuted_groups(where: str, groups: torch.Tensor, num_groups: int) -> torch.Tensor | None:
    """Return `groups`, the group of each input, int64 [inputs]; None if they are runs of one size.

    Raises ModelError if a group doesn't exist; `where` names the tensor.
    """
    if bool((groups == -1).all()):  # how llm-compressor fills what it doesn't use
        return None
    if not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        raise ModelError(f"{where} names groups outside 0..{num_groups - 1}")
    size = max(1, len(groups) // num_groups)
    if torch.equal(groups, torch.arange(len(groups)) // size):
        return None
    return groups


def dequantize_permuted(weight: QuantizedWeight, groups: torch.Tensor) -> torch.Tensor:
    """Return the plain weight, float32, of which input j has the scale of `groups[j]`."""
    values = bytes_of(weight.codes).float()
    if weight.zero_points is not None:
        values -= weight.zero_points.float()[:, groups]
    return values * numbers_of(weight.scales)[:, groups]
