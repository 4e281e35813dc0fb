"""SmolLM3: Llama's layers, every fourth of which knows no positions."""

from __future__ import annotations

from typing import Any

from stemma.model.families.family import Dense, Family
from stemma.model.families.llama import biased


def _rotating(config: Any) -> tuple[bool, ...]:
    return tuple(bool(rotates) for rotates in config.no_rope_layers[: config.num_hidden_layers])


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", "SmolLM3DecoderLayer", Dense(biased, rotating=_rotating))
