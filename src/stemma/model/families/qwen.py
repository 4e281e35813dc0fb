"""Qwen2 and 2.5, Qwen3, and Qwen3's mixtures of experts."""

from __future__ import annotations

from typing import Any

from stemma.model.families.family import ATTENTION, Dense, Family


def _inputs_of_attention(_config: Any) -> tuple[str, ...]:
    return ATTENTION[:3]


def _attention(config: Any) -> tuple[str, ...]:
    return ATTENTION if config.attention_bias else ()


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", "Qwen2DecoderLayer", Dense(_inputs_of_attention))
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", "Qwen3DecoderLayer", Dense(_attention, norms_heads=True))
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer")
