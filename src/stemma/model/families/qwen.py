"""Qwen2 and 2.5, Qwen3, and Qwen3's mixtures of experts."""

from __future__ import annotations

from typing import Any

from stemma.model.families.family import Family
from stemma.model.families.layout import Gated, Linear, Mixture, RoutedBy, Router
from stemma.model.families.mistral import one_window
from stemma.model.families.pattern import ATTENTION, LlamaPattern, gated, layer_path


def _inputs_of_attention(_config: Any) -> tuple[str, ...]:
    return ATTENTION[:3]


def _attention(config: Any) -> tuple[str, ...]:
    return ATTENTION if config.attention_bias else ()


def _mlp(config: Any, number: int) -> Gated | Mixture:
    path, hidden = f"{layer_path(number)}.mlp", config.hidden_size
    is_routed = number not in config.mlp_only_layers and config.num_experts > 0
    if not is_routed or (number + 1) % config.decoder_sparse_step:
        return gated(path, hidden, config.intermediate_size)
    router = Router(
        Linear(f"{path}.gate", config.num_experts, hidden),
        RoutedBy.ROUNDED_SOFTMAX,
        config.num_experts_per_tok,
        bool(config.norm_topk_prob),
    )
    width = config.moe_intermediate_size
    experts = (gated(f"{path}.experts.{expert}", hidden, width) for expert in range(config.num_experts))
    return Mixture(router, tuple(experts))


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", LlamaPattern(_inputs_of_attention))
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", LlamaPattern(_attention, norms_heads=True))
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    LlamaPattern(_attention, norms_heads=True, windows=one_window, mlp=_mlp),
)
