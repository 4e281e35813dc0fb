"""Facts about the models of one class of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from stemma.model.families.cuts import Cuts, plain_cuts
from stemma.model.families.expert_stacks import JoinExperts
from stemma.model.families.layout import ModelLayout
from stemma.model.families.pattern import LlamaPattern
from stemma.model.families.prediction import PredictionNames

MakeLayout: TypeAlias = Callable[[Any, int], ModelLayout | None]
"""Takes a config and a number of tensors; None: the native step doesn't compute what the config makes, or
that has more tensors."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A family whose quantized checkpoints have each expert's weights apart, and the others stacked."""

    layout: MakeLayout
    join: JoinExperts
    """Makes of a mixture's experts what transformers has."""


@dataclass(frozen=True, slots=True)
class Family:
    """One class of transformers whose logits the tests compare with transformers, on every path."""

    model_type: str
    """The `model_type` of config.json."""
    architecture: str
    """The class of transformers for a causal LM."""
    pattern: LlamaPattern | None = None
    """How it differs from Llama; None: it isn't of that pattern."""
    own_layout: MakeLayout | None = None
    """Makes the layout of a family of another pattern."""
    apart: Apart | None = None
    """Of quantized checkpoints, if the others stack experts."""
    cuts: Callable[[Any, int], Cuts] | None = plain_cuts
    """Takes a config and a number of ranks: how tensors are divided over them (parallel/share.py); None: it
    isn't served on several ranks."""
    layer_types: frozenset[str] = frozenset()
    """Names in its config's `layer_types` that other families' configs don't have."""
    prediction: PredictionNames | None = None
    """Its layer for multi-token prediction, if that is run (prediction.py)."""

    @property
    def layout(self) -> MakeLayout | None:
        """Return the layout that the native step computes; None: transformers' modules run."""
        return self.own_layout if self.pattern is None else self.pattern.layout
