"""Experts that a quantized checkpoint has apart, stacked as transformers' modules have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import torch

from stemma.errors import ModelError

Tensors: TypeAlias = dict[str, torch.Tensor]
JoinExperts: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors]
"""Takes gates and ups [experts, inner, hidden] and downs [experts, hidden, inner] of a layer; returns what
its mixture has, by name within it."""
_APART = re.compile(r"(.*)\.experts\.([0-9]+)\.(gate|up|down)_proj\.weight")


def stack_experts(weights: Tensors, join: JoinExperts) -> Tensors:
    """Return all weights by name; those named `MIXTURE.experts.N.PART_proj.weight` as `join` makes them.

    They are taken out of `weights` layer by layer, so that memory doesn't hold all of them twice. Raises
    ModelError if a mixture lacks some of its gates, ups or downs.
    """
    layers: dict[str, dict[str, dict[int, str]]] = {}
    for name in weights:
        if match := _APART.fullmatch(name):
            layers.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = name
    for path, parts in layers.items():
        if len({frozenset(parts.get(part, ())) for part in ("gate", "up", "down")}) > 1:
            message = f"{path}.experts lack some of their gates, ups or downs"
            raise ModelError(f"{message}; is the download complete?")
        stacked = (
            torch.stack([weights.pop(name) for _, name in sorted(parts[part].items())])
            for part in ("gate", "up", "down")
        )
        weights |= {f"{path}.{name}": tensor for name, tensor in join(*stacked).items()}
    return weights
