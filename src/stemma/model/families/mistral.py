"""Mistral: Llama's layers, with a window in some of its models."""

from __future__ import annotations

from typing import Any

from stemma.model.families.family import Dense, Family


def _slides(config: Any) -> bool:
    return config.sliding_window is not None


MISTRAL = Family("mistral", "MistralForCausalLM", "MistralDecoderLayer", Dense(slides=_slides))
