"""The Llama pattern, which most families follow with a bias or a norm more: its layout from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from stemma.errors import ModelError
from stemma.model.families.layout import (
    Angles,
    Gated,
    GroupedHeads,
    LatentHeads,
    Layer,
    Linear,
    Mixture,
    ModelLayout,
    Norm,
    Sinks,
    bounded_layers,
)
from stemma.model.families.rotary import RotaryAngles, has_fixed_angles

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
MAX_HEAD_DIM = 1024
"""Largest head that the native step has room for."""

Mlp: TypeAlias = Callable[[Any, int], Gated | Mixture]
"""Takes a config and a layer's number; returns what follows its attention."""


def no_biases(_config: Any) -> tuple[str, ...]:
    """Return no layers."""
    return ()


def all_rotate(config: Any) -> tuple[bool, ...]:
    """Return that all layers do."""
    return (True,) * int(config.num_hidden_layers)


def one_axis(_config: Any) -> tuple[int, ...]:
    """Return that positions have one axis."""
    return ()


def windows_by_type(config: Any) -> tuple[int | None, ...]:
    """Return the config's window for layers that `layer_types` says slide."""
    types = getattr(config, "layer_types", None) or ("full_attention",) * int(config.num_hidden_layers)
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in types)


def gated(path: str, hidden: int, width: int, biased: tuple[str, ...] = ()) -> Gated:
    """Return a gated layer whose linear layers lie in `path`."""
    gate, up, down = (f"{path}.{name}" for name in GATED)
    has = [name in biased for name in GATED]
    return Gated(
        Linear(gate, width, hidden, has[0]),
        Linear(up, width, hidden, has[1]),
        Linear(down, hidden, width, has[2]),
    )


def layer_path(number: int) -> str:
    """Return the name of a layer, without the dot."""
    return f"model.layers.{number}"


@dataclass(frozen=True, slots=True)
class LlamaPattern:
    """How a family differs from Llama."""

    biased: Callable[[Any], tuple[str, ...]] = no_biases
    """Takes a config; returns which of `ATTENTION` and `GATED` have a bias."""
    norms_heads: bool = False
    """Whether queries and keys are normed, head by head."""
    has_sinks: bool = False
    """Whether attention has sinks."""
    rounds_once: bool = False
    """Of its norms, see `Norm`."""
    rotating: Callable[[Any], tuple[bool, ...]] = all_rotate
    """Takes a config; returns for each layer whether it rotates queries and keys."""
    windows: Callable[[Any], tuple[int | None, ...]] = windows_by_type
    """Takes a config; returns each layer's sliding window."""
    mlp: Mlp | None = None
    """None: one gated layer."""
    axes: Callable[[Any], tuple[int, ...]] = one_axis
    """Takes a config; returns the axis of each angle."""

    def layout(self, config: Any, num_tensors: int) -> ModelLayout | None:
        """Return what `config` makes; None: the native step doesn't compute it, or it has more tensors."""
        if config.num_hidden_layers > num_tensors:
            return None
        head_dim, axes = head_dim_of(config), self.axes(config)
        heads = GroupedHeads(config.num_attention_heads, config.num_key_value_heads, head_dim, axes=axes)
        if axes and len(axes) != head_dim // 2:
            return None
        num_layers = config.num_hidden_layers
        rotating, windows = self.rotating(config), self.windows(config)
        if not (len(rotating) == len(windows) == num_layers) or not _is_native(config, heads):
            return None
        if any(window is not None and window < 1 for window in windows):
            return None
        layers = bounded_layers(
            lambda number: self._layer(config, number, heads, rotating[number], windows[number]),
            num_layers,
            num_tensors,
        )
        if layers is None:
            return None
        angles = partial(_angles, config, heads.head_dim)
        return with_ends(config, layers, heads, angles, rounds_once=self.rounds_once)

    def _layer(
        self, config: Any, number: int, heads: GroupedHeads, rotates: bool, window: int | None
    ) -> Layer:
        path, hidden, biased = layer_path(number), config.hidden_size, self.biased(config)
        query, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        attention = [
            Linear(f"{path}.self_attn.{name}", *shape, name in biased)
            for name, shape in zip(
                ATTENTION, ((query, hidden), (kv, hidden), (kv, hidden), (hidden, query)), strict=True
            )
        ]
        plain = partial(gated, f"{path}.mlp", hidden, config.intermediate_size, biased)
        normed = (
            Norm(f"{path}.self_attn.q_norm", heads.head_dim, config.rms_norm_eps),
            Norm(f"{path}.self_attn.k_norm", heads.head_dim, config.rms_norm_eps),
        )
        norm = partial(_norm, config, rounds_once=self.rounds_once)
        return Layer(
            inputs=tuple(attention[:3]),
            output=attention[3],
            mlp=plain() if self.mlp is None else self.mlp(config, number),
            input_norm=norm(f"{path}.input_layernorm"),
            post_norm=norm(f"{path}.post_attention_layernorm"),
            scaling=heads.head_dim**-0.5,
            head_norms=normed if self.norms_heads else None,
            window=window,
            rotates=rotates,
            sinks=Sinks(f"{path}.self_attn.sinks", heads.num_heads) if self.has_sinks else None,
        )


def with_ends(
    config: Any,
    layers: tuple[Layer, ...],
    heads: GroupedHeads | LatentHeads,
    angles: Callable[[], Angles],
    *,
    rounds_once: bool = False,
) -> ModelLayout:
    """Return the model of these layers, with the embedding, last norm and output head of `config`."""
    vocabulary, hidden = config.vocab_size, config.hidden_size
    return ModelLayout(
        layers=layers,
        heads=heads,
        embedding=Linear("model.embed_tokens", vocabulary, hidden),
        norm=_norm(config, "model.norm", rounds_once=rounds_once),
        head=None if config.tie_word_embeddings else Linear("lm_head", vocabulary, hidden),
        angles=angles,
    )


def head_dim_of(config: Any) -> int:
    """Return the dims of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _norm(config: Any, name: str, *, rounds_once: bool = False) -> Norm:
    return Norm(name, config.hidden_size, float(config.rms_norm_eps), rounds_once=rounds_once)


def _is_native(config: Any, heads: GroupedHeads) -> bool:
    """Whether the native step computes layers of such sizes, activations and angles."""
    if config.hidden_act != "silu" or not has_fixed_angles(config):
        return False
    if heads.num_kv_heads <= 0 or heads.num_heads % heads.num_kv_heads:
        return False
    # Products in bfloat16 take inputs in pairs.
    is_even = not any(size % 2 for size in (config.hidden_size, config.intermediate_size, heads.head_dim))
    return is_even and 0 < heads.head_dim <= MAX_HEAD_DIM


def _angles(config: Any, head_dim: int) -> Angles:
    angles = RotaryAngles(config, head_dim)
    if angles.num_dims != head_dim:
        raise ModelError(
            f"the rotary embedding has {angles.num_dims // 2} angles for heads of {head_dim} dims; two dims "
            "share one. See rope_parameters in config.json"
        )
    return angles


def as_stored(shapes: Mapping[str, tuple[int, ...]], pattern: LlamaPattern, *, is_tied: bool) -> ModelLayout:
    """Guess a model's layout from the tensors that a checkpoint has, before its config is read.

    Names and shapes are right if the checkpoint is one of the pattern; how layers attend is left open. Raises
    KeyError, IndexError or ValueError for other checkpoints.
    """
    num_layers = len({name.split(".")[2] for name in shapes if name.startswith("model.layers.")})

    def linear(name: str) -> Linear:
        outputs, inputs = shapes[f"{name}.weight"]
        return Linear(name, outputs, inputs, f"{name}.bias" in shapes)

    def norm(name: str) -> Norm:
        return Norm(name, shapes[f"{name}.weight"][0], 0.0)

    def layer(path: str) -> Layer:
        attention = [linear(f"{path}.self_attn.{name}") for name in ATTENTION]
        normed = (f"{path}.self_attn.q_norm", f"{path}.self_attn.k_norm")
        return Layer(
            inputs=tuple(attention[:3]),
            output=attention[3],
            mlp=_gated_of(linear, f"{path}.mlp"),
            input_norm=norm(f"{path}.input_layernorm"),
            post_norm=norm(f"{path}.post_attention_layernorm"),
            scaling=0.0,
            head_norms=(norm(normed[0]), norm(normed[1])) if pattern.norms_heads else None,
        )

    return ModelLayout(
        layers=tuple(layer(layer_path(number)) for number in range(num_layers)),
        heads=GroupedHeads(0, 0, 0),
        embedding=linear("model.embed_tokens"),
        norm=norm("model.norm"),
        head=None if is_tied else linear("lm_head"),
        angles=_unknown,
    )


def _gated_of(linear: Callable[[str], Linear], path: str) -> Gated:
    gate, up, down = (linear(f"{path}.{name}") for name in GATED)
    return Gated(gate, up, down)


def _unknown() -> Angles:
    raise AssertionError("a guess has no angles")
