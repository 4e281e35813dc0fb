"""The parts of a model: its tensors by name and shape, and how its layers attend and route.

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

from stemma.errors import ModelError

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Shapes of tensors, by name."""
Angles: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Any]
"""Takes a tensor of the model's dtype and positions [1, T]; returns cos and sin of their angles, [1, T, D]
each, or both as one complex tensor [1, T, D / 2]."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Which rows of a larger tensor a layer's weight is."""

    shape: tuple[int, ...]
    """Shape of the tensor: [rows, inputs], or [experts, rows, inputs]."""
    first_row: int
    expert: int | None = None
    is_transposed: bool = False
    """The tensor is [experts, inputs, rows]."""
    step: int = 1
    """Rows from one of the layer's to its next."""


@dataclass(frozen=True, slots=True)
class Bias:
    """A bias that is part of a tensor [experts, rows]."""

    name: str
    """The tensor's whole name."""
    piece: Piece
    """Its shape and rows."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: `NAME.weight` [outputs, inputs], and maybe `NAME.bias` [outputs]."""

    name: str
    outputs: int
    inputs: int
    has_bias: bool = False
    piece: Piece | None = None
    """None: the weight is a tensor of its own."""
    ending: str = ".weight"
    """Behind the name of the weight's tensor; some tensors that stack experts have none."""
    bias: Bias | None = None
    """Where the bias is instead of `NAME.bias`."""

    @property
    def weight(self) -> str:
        """The weight's tensor."""
        return f"{self.name}{self.ending}"

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        yield self.weight, (self.outputs, self.inputs) if self.piece is None else self.piece.shape
        if self.bias is not None:
            yield self.bias.name, self.bias.piece.shape
        elif self.has_bias:
            yield f"{self.name}.bias", (self.outputs,)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: `NAME.weight` [size]."""

    name: str
    size: int
    eps: float
    is_centered: bool = False
    """The weights are kept less 1."""
    rounds_once: bool = False
    """What is normed meets the weights before it is rounded, as it does where they are centered."""

    @property
    def in_floats(self) -> bool:
        """Whether the weights are taken in float32."""
        return self.is_centered or self.rounds_once

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensor."""
        yield f"{self.name}.weight", (self.size,)


@dataclass(frozen=True, slots=True)
class Clamped:
    """GPT-OSS's activation: `clamped_and_multiply` of native/layers.h."""

    sharpness: float
    limit: float


@dataclass(frozen=True, slots=True)
class Gated:
    """down(silu(gate x) * up x)."""

    gate: Linear
    up: Linear
    down: Linear
    clamped: Clamped | None = None
    """None: silu, or GELU."""
    is_gelu: bool = False
    """GELU by its approximation with tanh, instead of silu; for no expert."""

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
class ExpertRouter:
    """How a token's experts are chosen: `ExpertRouter` of native/mixture.h."""

    linear: Linear
    """Map from hidden states to the experts' logits; never rounded."""
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

    def __post_init__(self) -> None:
        """Raise ModelError for a choice that can't be made: the kernels don't look."""
        for chosen, count, what in (
            (self.top_k, self.linear.outputs, "experts"),
            (self.top_groups, self.num_groups, "groups of experts"),
        ):
            if type(chosen) is not int or not (count == 0 or 1 <= chosen <= count):
                raise ModelError(f"config.json gives a token {chosen} of {count} {what}")

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        yield from self.linear.shapes()
        if self.correction is not None:
            yield self.correction, (self.linear.outputs,)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts behind a router."""

    router: ExpertRouter
    experts: tuple[Gated, ...]
    shared: Gated | None = None
    """Experts that all tokens share, as one gated layer."""
    shared_gate: Linear | None = None
    """Map from states to a number, whose sigmoid the shared experts count by; None: they count whole."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        for part in (self.router, *self.experts, self.shared, self.shared_gate):
            if part is not None:
                yield from part.shapes()


@dataclass(frozen=True, slots=True)
class Latent:
    """Linears and norms of latent attention, beside its products of hidden states (DeepSeek-V2 and V3)."""

    norm: Norm
    """Norm of the token's latent, whose size is its rank."""
    projection: Linear
    """Map from latents to keys and values of all heads; used as a tensor, so never quantized."""
    expand: Linear | None = None
    """Map from the query's own latent to its heads; None: the query has none."""
    query_norm: Norm | None = None

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        for part in (self.norm, self.projection, self.expand, self.query_norm):
            if part is not None:
                yield from part.shapes()


class RecurrentKind(IntEnum):
    """The kind of recurrence that a layer computes: `RecurrentKind` of native/recurrent.h."""

    DELTA_RULE = 1
    """Gated DeltaNet."""
    MAMBA2 = 2


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Tensors that a recurrent layer has beside its products of hidden states."""

    kind: RecurrentKind
    path: str
    """Where its tensors lie."""
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm: Norm
    conv_at: int
    """Columns of the joined inputs, in the order of `Layer.order`: what is convolved, ..."""
    gate_at: int
    step_at: int
    beta_at: int = 0
    has_conv_bias: bool = False
    has_skip: bool = False
    gates_first: bool = False
    """Whether the gate comes before the norm."""
    norm_dim: int = 0
    """Numbers that are normed together."""
    step_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        yield f"{self.path}.conv1d.weight", (self.channels, 1, self.conv_width)
        if self.has_conv_bias:
            yield f"{self.path}.conv1d.bias", (self.channels,)
        for name in ("A_log", "dt_bias", *(("D",) if self.has_skip else ())):
            yield f"{self.path}.{name}", (self.heads,)
        yield from self.norm.shapes()


@dataclass(frozen=True, slots=True)
class Sinks:
    """Attention sinks: a score of each head beside those of its keys, without a value."""

    name: str
    """The tensor's whole name."""
    num_heads: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensor."""
        yield self.name, (self.num_heads,)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    inputs: tuple[Linear, ...]
    """Weights that read its normed hidden states: query, key and value; with latents the query or its latent,
    then the token's latent beside its rotary key; of a recurrent layer all that its scan reads."""
    output: Linear
    mlp: Gated | Mixture
    input_norm: Norm
    post_norm: Norm
    scaling: float
    """Factor of scores."""
    head_norms: tuple[Norm, Norm] | None = None
    """Norms of queries and of keys, head by head."""
    latent: Latent | None = None
    window: int | None = None
    """Tokens that a query sees, itself included; None: all."""
    rotates: bool = True
    """Whether queries and keys are rotated by their positions."""
    is_local: bool = False
    """Whether by the model's local angles."""
    out_norms: tuple[Norm, Norm] | None = None
    """Norms of what attention and what the MLP gives, before it is added; taken in floats."""
    recurrent: Recurrent | None = None
    """Instead of attention."""
    sinks: Sinks | None = None
    has_gates: bool = False
    """Whether the inputs end with gates of what is attended, one for each number."""
    order: tuple[int, ...] | None = None
    """Rows of the joined inputs, as the layer wants them; None: as they are."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors."""
        norms = (*(self.head_norms or ()), *(self.out_norms or ()))
        for part in (
            *self.inputs,
            self.output,
            self.mlp,
            self.input_norm,
            self.post_norm,
            *norms,
            self.latent,
            self.recurrent,
            self.sinks,
        ):
            if part is not None:
                yield from part.shapes()


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """Heads of queries, on fewer heads of keys and values, all of one size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    """Leading dims that are rotated; 0: all."""
    axes: tuple[int, ...] = ()
    """For each angle of a head the axis, 0 to 2, whose position it turns by; empty: there is one axis."""


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
    local_angles: Callable[[], Angles] | None = None
    """The same for layers that are local; None: none is."""
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    """Whether it is rounded to the model's dtype first."""
    residual_scale: float = 1.0
    """Factor of each half of a layer before it is added."""
    logits_divisor: float = 1.0

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
        num_tensors -= len({name for name, _ in layer.shapes()})
        layers.append(layer)
    return tuple(layers)
