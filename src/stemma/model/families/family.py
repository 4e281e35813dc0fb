"""What Stemma knows of the models of one class of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")

Biased: TypeAlias = Callable[[Any], tuple[str, ...]]
"""Takes a config; returns the linear layers that have a bias."""


def no_biases(_config: Any) -> tuple[str, ...]:
    """Return no layers."""
    return ()


def all_rotate(config: Any) -> tuple[bool, ...]:
    """Return that all layers do."""
    return (True,) * int(config.num_hidden_layers)


def any_layer_slides(config: Any) -> bool:
    """Whether a layer of a config with `layer_types` may see a window alone."""
    types = getattr(config, "layer_types", None)
    return types is not None and (len(types) < config.num_hidden_layers or set(types) != {"full_attention"})


@dataclass(frozen=True, slots=True)
class Dense:
    """A family of the Llama pattern, whose tensors are read without transformers' modules (dense.py)."""

    biased: Biased = no_biases
    norms_heads: bool = False
    """Whether queries and keys are normed, head by head."""
    rotating: Callable[[Any], tuple[bool, ...]] = all_rotate
    """Takes a config; returns for each layer whether it rotates queries and keys."""
    slides: Callable[[Any], bool] = any_layer_slides
    """Whether a config has sliding windows; such models go through transformers' modules."""


@dataclass(frozen=True, slots=True)
class Family:
    """One class of transformers whose logits the tests compare with transformers, on every path.

    All of them are cut for several ranks (parallel/share.py).
    """

    model_type: str
    """Of config.json."""
    architecture: str
    """The class of transformers for a causal LM."""
    layer_class: str | None = None
    """The decoder layer that the native step computes (cpu/fused.py); None: its modules run."""
    dense: Dense | None = None
    prediction: bool = False
    """Whether its layer for multi-token prediction is run (prediction.py)."""
