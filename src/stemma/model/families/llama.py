"""Llama, and what calls itself so: SmolLM2, Yi, and many others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stemma.errors import UnsupportedModel
from stemma.model.families.family import Family
from stemma.model.families.gguf import LAYER_NAMES, Fields, GGUFForm, dense
from stemma.model.families.pattern import ATTENTION, GATED, LlamaPattern

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def biased(config: Any) -> tuple[str, ...]:
    """Return the layers with a bias: of attention all or none, of the gated part too."""
    attention = ATTENTION if config.attention_bias else ()
    return (*attention, *GATED) if config.mlp_bias else attention


def _read_gguf(fields: Fields) -> PreTrainedConfig:
    from stemma.model.llama_config import LlamaConfig

    if fields.get("attention.sliding_window"):
        raise UnsupportedModel(
            f"{fields.header.path} is a llama with a sliding window, which isn't read from GGUF; give the "
            "directory of the original checkpoint"
        )
    has_bias = "blk.0.attn_q.bias" in fields.header.tensors
    return LlamaConfig(architectures=["LlamaForCausalLM"], attention_bias=has_bias, **dense(fields))


LLAMA = Family("llama", "LlamaForCausalLM", LlamaPattern(biased))
LLAMA_FORM = GGUFForm("llama", _read_gguf, LAYER_NAMES, pairs_rotate=True)
