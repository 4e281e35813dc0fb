"""Seed-OSS: Llama's layers, with biases before attention alone."""

from __future__ import annotations

from typing import Any

from stemma.model.families.family import Family
from stemma.model.families.pattern import ATTENTION, GATED, LlamaPattern


def _biased(config: Any) -> tuple[str, ...]:
    inputs = ATTENTION[:3] if config.attention_bias else ()
    output = ATTENTION[3:] if config.attention_out_bias else ()
    return (*inputs, *output, *(GATED if config.mlp_bias else ()))


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", LlamaPattern(_biased))
