"""Mistral: Llama's layers, with one window for all of them in some of its models."""

from __future__ import annotations

from typing import Any

from stemma.model.families.family import Family
from stemma.model.families.pattern import LlamaPattern


def one_window(config: Any) -> tuple[int | None, ...]:
    """Return the config's window for every layer."""
    return (getattr(config, "sliding_window", None),) * int(config.num_hidden_layers)


MISTRAL = Family("mistral", "MistralForCausalLM", LlamaPattern(windows=one_window))
