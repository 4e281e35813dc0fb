"""Adapters of models that run through transformers' modules: each adapted layer adds to its own output.

Which layers can be adapted is observed, not guessed: those that are called once in a pass, with one row a
token. That leaves out routed experts, an output head that gets the last rows alone, and a layer whose weight
the model uses without calling it (the expansion of a cached latent).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from stemma.errors import UnsupportedModel
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cpu.weights import PackedProduct, can_pack
from stemma.model.lora.adapter import Adapter, LinearShape, LowRankPair
from stemma.native.library import Kernels

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""x [T, in_features] -> [T, out_features]; a row's result doesn't depend on the others."""
_PROBED = 2
"""Tokens of the pass that shows which layers are called how."""


@dataclass(frozen=True, slots=True)
class _Addition:
    down: Product
    up: Product
    scale: float

    def to(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to outputs y [T, out_features] of rows x [T, in_features]."""
        # Two operations, each rounded by itself: one that does both rounds by where an element lies.
        added = self.up(self.down(x)).float() * self.scale
        y.copy_(y.float() + added)


class AdaptedModules:
    """The layers of a model that adapters may add to. Not thread-safe: one owner, whoever runs the model."""

    def __init__(self, hf_model: nn.Module, kernels: Kernels | None, run: Callable[[int], None]) -> None:
        """`run` runs the model on that many tokens, logits of the last one wanted."""
        self._kernels = kernels
        some = next(hf_model.parameters())
        self._device, self._dtype = some.device, some.dtype
        self._linears = _find_linears(hf_model, run)
        self._hooked: set[str] = set()
        self._batch: ForwardBatch | None = None
        self._num_calls = 0

    @property
    def shapes(self) -> dict[str, LinearShape]:
        """Return the layers by name."""
        return {
            name: LinearShape(int(module.out_features), int(module.in_features))
            for name, module in self._linears.items()
        }

    def prepare(self, adapter: Adapter) -> Mapping[str, _Addition]:
        """Return the adapter's products as a step uses them, and have its layers look for them."""
        for name in adapter.pairs.keys() - self._hooked:
            self._linears[name].register_forward_hook(self._hook(name))
            self._hooked.add(name)
        return {name: self._addition(pair) for name, pair in adapter.pairs.items()}

    @contextmanager
    def step(self, batch: ForwardBatch) -> Iterator[None]:
        """Within it, the layers add what the batch's adapters say. Raises UnsupportedModel if one didn't."""
        if not batch.adapters:
            yield
            return
        self._batch, self._num_calls = batch, 0
        try:
            yield
        finally:
            self._batch = None
        num_expected = len({name for rows in batch.adapters for name in _additions(rows.prepared)})
        if self._num_calls != num_expected:
            raise UnsupportedModel(
                f"{self._num_calls} layers asked for their adapters in a step, not {num_expected}: this "
                "model doesn't call its layers as others do, so adapters can't be served on it"
            )

    def _hook(self, name: str) -> Callable[..., torch.Tensor | None]:
        def add(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if self._batch is None:
                return
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            y = output.view(-1, output.shape[-1])
            assert len(x) == len(self._batch.token_ids)
            found = False
            for each in self._batch.adapters:
                addition = _additions(each.prepared).get(name)
                if addition is not None:
                    found = True
                    addition.to(x[slice(*each.rows)], y[slice(*each.rows)])
            self._num_calls += found

        return add

    def _addition(self, pair: LowRankPair) -> _Addition:
        down, up = pair.ready(self._dtype)
        return _Addition(self._product(down), self._product(up), pair.scale)

    def _product(self, weight: torch.Tensor) -> Product:
        if self._kernels is not None and can_pack(weight):
            return PackedProduct(self._kernels, [weight])
        placed = weight.to(self._device)
        return lambda x: F.linear(x, placed)


def _additions(prepared: object) -> Mapping[str, _Addition]:
    assert isinstance(prepared, dict)
    return prepared


def _find_linears(hf_model: nn.Module, run: Callable[[int], None]) -> dict[str, Any]:
    """Return the linear layers that are called once in a pass, with all its rows."""
    called: dict[str, list[int]] = {}
    hooks = []

    def record(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
            if isinstance(output, torch.Tensor):  # routers have features too, and return choices and weights
                called.setdefault(name, []).append(output.numel() // output.shape[-1])

        return hook

    linears = {
        name: module
        for name, module in hf_model.named_modules()
        if hasattr(module, "in_features") and hasattr(module, "out_features")
    }
    for name, module in linears.items():
        hooks.append(module.register_forward_hook(record(name)))
    try:
        run(_PROBED)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: module for name, module in linears.items() if called.get(name) == [_PROBED]}
