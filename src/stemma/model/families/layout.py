"""What a model is made of: its tensors by name and shape, and how its layers attend and route.

A family makes a `ModelLayout` from a config. It is all that the fused decoder and the loader know of a model:
the decoder takes each part's tensors out of the checkpoint by these names, and a checkpoint that has exactly
these tensors, in these shapes, needs no module of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import torch

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Of tensors, by name."""
Angles: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Any]
"""Takes a tensor of the model's dtype and positions [1, T]; returns cos and sin of their angles, [1, T, D]
each, or both as one complex tensor [1, T, D / 2]."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: `NAME.weight` [outputs, inputs], and maybe `NAME.bias` [outputs]."""

    name: str
    outputs: int
    inputs: int
    has_bias: bool = False

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        yield f"{self.name}.weight", (self.outputs, self.inputs)
        if self.has_bias:
            yield f"{self.name}.bias", (self.outputs,)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: `NAME.weight` [size]."""

    name: str
    size: int
    eps: float

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensor."""
        yield f"{self.name}.weight", (self.size,)


@dataclass(frozen=True, slots=True)
class Gated:
    """down(silu(gate x) * up x)."""

    gate: Linear
    up: Linear
    down: Linear

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        for linear in (self.gate, self.up, self.down):
            yield from linear.shapes()


class RoutedBy(IntEnum):
    """How scores become weights: `RoutedBy` of native/mixture.h."""

    ROUNDED_SOFTMAX = 0
    SOFTMAX = 1
    SIGMOID = 2


@dataclass(frozen=True, slots=True)
class Router:
    """How a token's experts are chosen: `Router` of native/mixture.h."""

    linear: Linear
    """Of hidden states to the experts' logits; never rounded."""
    by: RoutedBy
    top_k: int
    normalize: bool
    """Divide the weights of a token's experts by their sum."""
    scale: float = 1.0
    correction: str | None = None
    """Name of a tensor [E], added to scores for the choice alone."""
    num_groups: int = 0
    """0: experts are in no groups."""
    top_groups: int = 0

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        yield from self.linear.shapes()
        if self.correction is not None:
            yield self.correction, (self.linear.outputs,)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts behind a router."""

    router: Router
    experts: tuple[Gated, ...]
    shared: Gated | None = None
    """Experts that all tokens share, as one gated layer."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        for part in (self.router, *self.experts, *(() if self.shared is None else (self.shared,))):
            yield from part.shapes()


@dataclass(frozen=True, slots=True)
class Latent:
    """What a layer with latent attention has beside its products of hidden states (DeepSeek-V2 and V3)."""

    norm: Norm
    """Of the token's latent, whose size is its rank."""
    projection: Linear
    """Of latents to keys and values of all heads; used as a tensor, so never quantized."""
    expand: Linear | None = None
    """Of the query's own latent to its heads; None: the query has none."""
    query_norm: Norm | None = None

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        for part in (self.norm, self.projection, self.expand, self.query_norm):
            if part is not None:
                yield from part.shapes()


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    inputs: tuple[Linear, ...]
    """What reads its normed hidden states: query, key and value; with latents the query or its latent, then
    the token's latent beside its rotary key."""
    output: Linear
    mlp: Gated | Mixture
    input_norm: Norm
    post_norm: Norm
    scaling: float
    """Of scores."""
    head_norms: tuple[Norm, Norm] | None = None
    """Of queries and of keys, head by head."""
    latent: Latent | None = None
    window: int | None = None
    """Tokens that a query sees, itself included; None: all."""
    rotates: bool = True
    """Whether queries and keys are rotated by their positions."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        norms = self.head_norms or ()
        for part in (
            *self.inputs,
            self.output,
            self.mlp,
            self.input_norm,
            self.post_norm,
            *norms,
            self.latent,
        ):
            if part is not None:
                yield from part.shapes()


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """Heads of queries, on fewer heads of keys and values, all of one size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Rotation(IntEnum):
    """How the rotary part of a head is paired, and the order it is left in: `Rotation` of native/latent.h."""

    HALVES = 0
    PAIRS_TO_HALVES = 1
    PAIRS = 2


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """All heads over one latent and one rotary key."""

    num_heads: int
    rank: int
    nope_dim: int
    """Dims of a query and key without positions."""
    rope_dim: int
    value_dim: int
    rotation: Rotation


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A whole model."""

    layers: tuple[Layer, ...]
    heads: GroupedHeads | LatentHeads
    embedding: Linear
    norm: Norm
    head: Linear | None
    """None: the output head is the embedding."""
    angles: Callable[[], Angles]
    """Makes what computes rotary angles."""

    def shapes(self) -> Shapes:
        """Return all tensors of a checkpoint."""
        ends = (self.embedding, self.norm, *(() if self.head is None else (self.head,)))
        return dict(shape for part in (*ends, *self.layers) for shape in part.shapes())


def bounded_layers(
    make: Callable[[int], Layer], num_layers: int, num_tensors: int
) -> tuple[Layer, ...] | None:
    """Return layers 0 to `num_layers` - 1; None if they have more than `num_tensors` tensors.

    A damaged config may count more layers and experts than there is time for.
    """
    layers: list[Layer] = []
    while len(layers) < num_layers:
        if num_tensors <= 0:
            return None
        layer = make(len(layers))
        num_tensors -= sum(1 for _ in layer.shapes())
        layers.append(layer)
    return tuple(layers)
