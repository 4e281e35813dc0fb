"""Llama, and what calls itself so: SmolLM2, Yi, and many others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.families.family import Family
from stemma.model.families.gguf import LAYER_NAMES, Fields, GGUFForm, base, dense, experts
from stemma.model.families.gguf_changes import Change, rotated_heads
from stemma.model.families.pattern import ATTENTION, GATED, LlamaPattern, head_dim_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def biased(config: Any) -> tuple[str, ...]:
    """Return the layers with a bias: of attention all or none, of the gated part too."""
    attention = ATTENTION if config.attention_bias else ()
    return (*attention, *GATED) if config.mlp_bias else attention


def _read_gguf(fields: Fields) -> PreTrainedConfig:
    from stemma.model.files.llama_config import LlamaConfig

    _check_window(fields)
    has_bias = "blk.0.attn_q.bias" in fields.header.tensors
    return LlamaConfig(architectures=["LlamaForCausalLM"], attention_bias=has_bias, **dense(fields))


def _read_mixtral(fields: Fields) -> PreTrainedConfig:
    from transformers import MixtralConfig

    _check_window(fields)
    num_experts, num_used, width = experts(fields)
    if width != fields.whole("feed_forward_length", width):
        raise ModelError(f"{fields.header.path}: feed_forward_length isn't that of its tensors, {width}")
    return MixtralConfig(
        architectures=["MixtralForCausalLM"],
        num_local_experts=num_experts,
        num_experts_per_tok=num_used,
        intermediate_size=width,
        sliding_window=None,
        **base(fields),
    )


def _check_window(fields: Fields) -> None:
    if fields.get("attention.sliding_window"):
        raise UnsupportedModel(
            f"{fields.header.path} is a llama with a sliding window, which isn't read from GGUF; give the "
            "directory of the original checkpoint"
        )


def _change(name: str, config: Any) -> Change | None:
    return rotated_heads(name, config, head_dim_of(config))


LLAMA = Family("llama", "LlamaForCausalLM", LlamaPattern(biased))
LLAMA_FORMS = (
    GGUFForm("llama", _read_gguf, LAYER_NAMES, change=_change),
    GGUFForm(
        "llama",
        _read_mixtral,
        LAYER_NAMES | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts={
            f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.w{number}"
            for number, part in enumerate(("gate", "down", "up"), start=1)
        },
        change=_change,
        has_experts=True,
    ),
)
"""The second is Mixtral."""
