"""The weights of transformers' modules as packing takes them: the checkpoint's codes where it has any."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from stemma.errors import ModelError
from stemma.model.weights.named import Affine, Weight
from stemma.model.weights.stored import DeferredWeight

_EXPERT = "experts"
_MIXTRAL = re.compile(r"\.block_sparse_moe\.experts\.([0-9]+)\.(w[123])\.")
"""How checkpoints of Mixtral's pattern name experts."""
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class ModuleWeights:
    """Looks a module's codes up by its path in the model; without codes its own numbers count."""

    def __init__(self, model: nn.Module, codes: Mapping[str, DeferredWeight]) -> None:
        """Take the quantized weights of the checkpoint, by name.

        A name `PATH.weight` belongs to the module at PATH; one whose PATH ends in `experts.N.PART` to the
        module at `...experts`, which may hold all experts in one tensor. Raises ModelError if there is no
        such module, or if its weight has another shape.
        """
        self._paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        self._codes = {_MIXTRAL.sub(_renamed, name): value for name, value in codes.items()}
        for name, value in self._codes.items():
            _check_place(model, name, value)

    @property
    def num_codes(self) -> int:
        """How many weights are quantized."""
        return len(self._codes)

    def linear(self, module: Any) -> Affine:
        """Return what a linear layer computes with."""
        bias = None if module.bias is None else module.bias.detach()
        return Affine(self._codes_of(module, "weight") or module.weight.detach(), bias)

    def head(self, head: Any, embedding: Any = None) -> Affine:
        """Return what the output head computes with; `embedding`: one that is tied to it."""
        found = self.linear(head)
        codes = self._codes_of(embedding, "weight") if embedding is not None else None
        return found if codes is None else Affine(codes, found.bias)

    def experts(self, module: Any, part: str, stacked: Any) -> list[Weight]:
        """Return each expert's weight of a set of experts, whose plain ones are `stacked` [E, n, k].

        `part`: what checkpoints in quantized form call it, e.g. `up_proj`.
        """
        return [
            self._codes_of(module, f"{number}.{part}.weight") or plain.detach()
            for number, plain in enumerate(stacked)
        ]

    def _codes_of(self, module: nn.Module, name: str) -> Any:
        path = self._paths.get(module)
        found = None if path is None else self._codes.get(f"{path}.{name}" if path else name)
        return None if found is None else found.make()


def _renamed(match: re.Match[str]) -> str:
    return f".mlp.experts.{match[1]}.{_PARTS[match[2]]}."


def _check_place(model: nn.Module, name: str, value: DeferredWeight) -> None:
    path, _, parameter = name.rpartition(".")
    module, rest = _module_at(model, path)
    plain = getattr(module, parameter, None)
    if parameter != "weight" or (rest and _EXPERT not in path) or (not rest and plain is None):
        raise ModelError(f"{type(model).__name__} has no place for the quantized weight {name}")
    if plain is not None and not rest and plain.shape != value.shape:
        raise ModelError(f"{name} is {list(value.shape)} in the file, {list(plain.shape)} in the model")


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
