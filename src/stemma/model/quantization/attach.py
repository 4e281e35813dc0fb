"""How a model of transformers gets quantized weights that a reader found in a checkpoint.

A reader returns `StoredWeights`: tensors by name, some of them quantized and still in their file.
transformers builds the model from `plain_weights`. Where its own code must compute with them (the self-check,
machines without our kernels, layers that stay plain) these hold the dequantized numbers; where a weight is
only going to be packed, a spare stands in for it: a tensor of the right shape that is one zero in memory.
`attach` hangs the quantized weights on the modules that multiply with them, and packing reads those, one
after the other, instead of the plain ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stemma.errors import ModelError
from stemma.model.quantization.stored import DeferredWeight, StoredWeights
from stemma.model.quantization.weights import QuantizedWeight

_ATTRIBUTE = "stemma_quantized"
_PACKED = re.compile(r"(?:(?<!kv_b)_proj|_proj_with_mqa|\blm_head|\bembed_tokens)\.weight$")
"""Weights that are packed in every model whose class is tested. `kv_b_proj` is used as a tensor."""


def plain_weights(
    weights: Mapping[str, torch.Tensor | QuantizedWeight], dtype: torch.dtype, *, spares: bool = False
) -> dict[str, torch.Tensor]:
    """Return all weights as tensors of `dtype`, the quantized ones dequantized.

    With `spares`, those that are going to be packed are spares.
    """
    deferred = weights.deferred() if spares and isinstance(weights, StoredWeights) else {}
    plain = {}
    for name in weights:
        if name in deferred and _PACKED.search(name):
            plain[name] = _spare(deferred[name].shape, dtype)
            continue
        value = weights[name]
        plain[name] = value.dequantize(dtype) if isinstance(value, QuantizedWeight) else value
    return plain


def _spare(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)


def is_spare(weight: torch.Tensor) -> bool:
    """Whether a weight is a spare: all its elements are one element in memory."""
    return weight.dim() > 1 and weight.numel() > 1 and not any(weight.stride())


class _JoinedSpares(TorchFunctionMode):
    """Makes spares of joined spares: loading stacks a layer's experts, which would write their zeros out."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.stack, torch.cat) and args and isinstance(args[0], list | tuple):
            parts = args[0]
            if parts and all(isinstance(part, torch.Tensor) and is_spare(part) for part in parts):
                abstract = [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts]
                joined = func(abstract, *args[1:], **(kwargs or {}))
                return _spare(joined.shape, joined.dtype)
        return func(*args, **(kwargs or {}))


@contextmanager
def spares_stay() -> Iterator[None]:
    """Let spares be joined to spares meanwhile, in this thread."""
    with _JoinedSpares():
        yield


@contextmanager
def stacked_spares_rest(model: nn.Module) -> Iterator[None]:
    """Let modules whose spares stand for stacked experts return zeros meanwhile, shaped as their inputs.

    torch's grouped products refuse such tensors.
    """
    resting: list[Any] = [
        module
        for module in model.modules()
        if any(weight.dim() == 3 and is_spare(weight) for weight in module.parameters(recurse=False))
    ]
    for module in resting:
        module.forward = _zeros_like_first
    try:
        yield
    finally:
        for module in resting:
            del module.forward


def _zeros_like_first(hidden: torch.Tensor, *_others: Any, **_named: Any) -> torch.Tensor:
    return torch.zeros_like(hidden)


def attach(model: nn.Module, weights: Mapping[str, DeferredWeight]) -> None:
    """Hang quantized weights on the modules that they belong to.

    A name `PATH.weight` belongs to the module at PATH; one whose PATH ends in `experts.N.PART` belongs to the
    module at `...experts`, which may hold all experts in one tensor. Raises ModelError if there is no such
    module, or if its weight has another shape.
    """
    for name, value in weights.items():
        path, _, parameter = name.rpartition(".")
        module, rest = _module_at(model, path)
        plain = getattr(module, parameter, None)
        if parameter != "weight" or (rest and "experts" not in path) or (not rest and plain is None):
            raise ModelError(f"{type(model).__name__} has no place for the quantized weight {name}")
        if plain is not None and not rest and plain.shape != value.shape:
            raise ModelError(f"{name} is {list(value.shape)} in the file, {list(plain.shape)} in the model")
        held: dict[str, Callable[[], QuantizedWeight]] = module.__dict__.setdefault(_ATTRIBUTE, {})
        held[f"{rest}.{parameter}" if rest else parameter] = value.make


def attached(module: Any, name: str = "weight") -> QuantizedWeight | None:
    """Read the quantized weight of a module, e.g. "weight", or "3.gate_proj.weight" of a set of experts.

    Raises ModelError if its file is damaged.
    """
    held: dict[str, Callable[[], QuantizedWeight]] = getattr(module, _ATTRIBUTE, {})
    return held[name]() if name in held else None


def has_attached(model: nn.Module) -> bool:
    """Whether a module of `model` has a quantized weight."""
    return any(_ATTRIBUTE in module.__dict__ for module in model.modules())


def plain_weight(module: Any) -> torch.Tensor:
    """Return the weight of a module, dequantized if the module has a spare."""
    weight: torch.Tensor = module.weight.detach()
    if not is_spare(weight):
        return weight
    quantized = attached(module)
    assert quantized is not None
    return quantized.dequantize(weight.dtype)


def fill(model: nn.Module) -> None:
    """Give the modules of `model` that still have a spare their plain weight."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and is_spare(weight):
            weight.data = plain_weight(module)


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
