"""SmolLM3: Llama's layers, every fourth of which knows no positions."""

from __future__ import annotations

from typing import Any

from stemma.model.families.family import Family
from stemma.model.families.llama import biased
from stemma.model.families.pattern import LlamaPattern, windows_by_type


def _rotating(config: Any) -> tuple[bool, ...]:
    return tuple(bool(rotates) for rotates in config.no_rope_layers[: config.num_hidden_layers])


def _windows(config: Any) -> tuple[int | None, ...]:
    return windows_by_type(config) if config.use_sliding_window else (None,) * int(config.num_hidden_layers)


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    LlamaPattern(biased, rotating=_rotating, windows=_windows),
)
