"""Llama, and what calls itself so: SmolLM2, Yi, and many others."""

from __future__ import annotations

from typing import Any

from stemma.model.families.family import Family
from stemma.model.families.pattern import ATTENTION, GATED, LlamaPattern


def biased(config: Any) -> tuple[str, ...]:
    """Return the layers with a bias: of attention all or none, of the gated part too."""
    attention = ATTENTION if config.attention_bias else ()
    return (*attention, *GATED) if config.mlp_bias else attention


LLAMA = Family("llama", "LlamaForCausalLM", LlamaPattern(biased))
