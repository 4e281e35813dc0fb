"""How a model of transformers gets quantized weights that a reader found in a checkpoint.

A reader returns `StoredWeights`: tensors by name, some of them quantized. transformers builds the model from
`plain_weights`, so that its own code runs (the probe, the self-check, machines without our kernels). `attach`
then hangs the quantized weights on the modules that multiply with them, and packing takes those instead of
the plain ones. While a model loads it takes the memory of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from stemma.errors import ModelError
from stemma.model.quantization.weights import QuantizedWeight

StoredWeights: TypeAlias = Mapping[str, torch.Tensor | QuantizedWeight]
"""Names are those of the checkpoint in the format of transformers: `model.layers.0.mlp.up_proj.weight`."""
_ATTRIBUTE = "stemma_quantized"


def plain_weights(weights: StoredWeights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return all weights as tensors, the quantized ones dequantized to `dtype`."""
    return {
        name: value.dequantize(dtype) if isinstance(value, QuantizedWeight) else value
        for name, value in weights.items()
    }


def attach(model: nn.Module, weights: StoredWeights) -> None:
    """Hang the quantized ones of `weights` on the modules that they belong to.

    A name `PATH.weight` belongs to the module at PATH; one whose PATH ends in `experts.N.PART` belongs to the
    module at `...experts`, which may hold all experts in one tensor. Raises ModelError if there is no such
    module, or if its weight has another shape.
    """
    for name, value in weights.items():
        if not isinstance(value, QuantizedWeight):
            continue
        path, _, parameter = name.rpartition(".")
        module, rest = _module_at(model, path)
        plain = getattr(module, parameter, None)
        if parameter != "weight" or (rest and "experts" not in path) or (not rest and plain is None):
            raise ModelError(f"{type(model).__name__} has no place for the quantized weight {name}")
        if plain is not None and not rest and plain.shape != value.shape:
            raise ModelError(f"{name} is {list(value.shape)} in the file, {list(plain.shape)} in the model")
        held: dict[str, QuantizedWeight] = module.__dict__.setdefault(_ATTRIBUTE, {})
        held[f"{rest}.{parameter}" if rest else parameter] = value


def attached(module: Any, name: str = "weight") -> QuantizedWeight | None:
    """Return the quantized weight of a module, e.g. "weight", or "3.gate_proj.weight" of a set of experts."""
    held: dict[str, QuantizedWeight] = getattr(module, _ATTRIBUTE, {})
    return held.get(name)


def has_attached(model: nn.Module) -> bool:
    """Whether a module of `model` has a quantized weight."""
    return any(_ATTRIBUTE in module.__dict__ for module in model.modules())


def detach(model: nn.Module) -> None:
    """Drop what is attached to the modules of `model`; packed weights have taken its place."""
    for module in model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)


def _module_at(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the deepest module on a path, and what of the path is left."""
    module: nn.Module = model
    names = path.split(".")
    for depth, name in enumerate(names):
        child = getattr(module, name, None)
        if not isinstance(child, nn.Module):
            return module, ".".join(names[depth:])
        module = child
    return module, ""
