"""Qwen2 and 2.5, Qwen3, and Qwen3's mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stemma.errors import UnsupportedModel
from stemma.model.families.family import Family
from stemma.model.families.gguf import LAYER_NAMES, Fields, GGUFForm, base, dense, experts
from stemma.model.families.layout import ExpertRouter, Gated, Linear, Mixture, Piece, RoutedBy
from stemma.model.families.mistral import one_window
from stemma.model.families.pattern import ATTENTION, LlamaPattern, gated, head_dim_of, layer_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_MOST_STACKED = 1024
"""Experts of which a layer's are pieces of two tensors, whose number doesn't bound them."""


def _inputs_of_attention(_config: Any) -> tuple[str, ...]:
    return ATTENTION[:3]


def _attention(config: Any) -> tuple[str, ...]:
    return ATTENTION if config.attention_bias else ()


def _mlp(config: Any, number: int) -> Gated | Mixture:
    path, hidden = f"{layer_path(number)}.mlp", config.hidden_size
    is_routed = number not in (config.mlp_only_layers or ()) and config.num_experts > 0
    if not is_routed or (number + 1) % config.decoder_sparse_step:
        return gated(path, hidden, config.intermediate_size)
    router = ExpertRouter(
        Linear(f"{path}.gate", config.num_experts, hidden),
        RoutedBy.ROUNDED_SOFTMAX,
        config.num_experts_per_tok,
        bool(getattr(config, "norm_topk_prob", True)),
    )
    width = config.moe_intermediate_size
    experts = (gated(f"{path}.experts.{expert}", hidden, width) for expert in range(config.num_experts))
    return Mixture(router, tuple(experts))


def _stacked_mlp(config: Any, number: int) -> Gated | Mixture:
    """Return what Qwen3-VL's mixtures have: all experts of a layer in two tensors, inputs before outputs."""
    if config.num_experts > _MOST_STACKED:
        raise UnsupportedModel(f"config.json counts {config.num_experts} experts; served are {_MOST_STACKED}")
    mlp = _mlp(config, number)
    if isinstance(mlp, Gated):
        return mlp
    path, count = f"{layer_path(number)}.mlp.experts", config.num_experts
    hidden, width = config.hidden_size, config.moe_intermediate_size
    joined, down = (count, hidden, 2 * width), (count, width, hidden)

    def expert(number: int) -> Gated:
        gate, up = (Piece(joined, first, number, is_transposed=True) for first in (0, width))
        return Gated(
            Linear(f"{path}.gate_up_proj", width, hidden, piece=gate),
            Linear(f"{path}.gate_up_proj", width, hidden, piece=up),
            Linear(f"{path}.down_proj", hidden, width, piece=Piece(down, 0, number, is_transposed=True)),
        )

    experts = tuple(expert(number) for number in range(count))
    return replace(mlp, router=replace(mlp.router, normalize=True), experts=experts)


def _qwen2(fields: Fields) -> PreTrainedConfig:
    from transformers import Qwen2Config

    return Qwen2Config(architectures=["Qwen2ForCausalLM"], use_sliding_window=False, **dense(fields))


def _qwen3(fields: Fields) -> PreTrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(architectures=["Qwen3ForCausalLM"], use_sliding_window=False, **dense(fields))


def _qwen3_moe(fields: Fields) -> PreTrainedConfig:
    from transformers import Qwen3MoeConfig

    num_experts, num_used, width = experts(fields)
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=num_experts,
        num_experts_per_tok=num_used,
        moe_intermediate_size=width,
        intermediate_size=fields.whole("feed_forward_length", width),
        norm_topk_prob=True,  # llama.cpp's graph of the family always does
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
        **base(fields),
    )


def _sections(config: Any) -> tuple[int, ...]:
    """Return the axes of angles that lie axis behind axis: some for time, some for height, some for width."""
    sections = config.rope_parameters.get("mrope_section", (16, 24, 24))
    return tuple(number % 3 for number, size in enumerate(sections) for _ in range(size))


def _interleaved(config: Any) -> tuple[int, ...]:
    """Return the axes of angles that take turns: time, height, width, and time alone from where these end."""
    sections = config.rope_parameters.get("mrope_section", (24, 20, 20))
    return tuple(
        number % 3 if number < 3 * sections[number % 3] else 0 for number in range(head_dim_of(config) // 2)
    )


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", LlamaPattern(_inputs_of_attention))
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", LlamaPattern(_attention, norms_heads=True))
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    LlamaPattern(_attention, norms_heads=True, windows=one_window, mlp=_mlp),
)
QWEN2_5_VL_TEXT = Family(
    "qwen2_5_vl_text",
    "Qwen2_5_VLTextModel",
    LlamaPattern(_inputs_of_attention, axes=_sections),
    cuts=None,
)
"""Behind a vision encoder, and never without."""
QWEN3_VL_TEXT = Family(
    "qwen3_vl_text",
    "Qwen3VLTextModel",
    LlamaPattern(_attention, norms_heads=True, axes=_interleaved),
    cuts=None,
)
"""Behind a vision encoder, and never without."""
QWEN3_VL_MOE_TEXT = Family(
    "qwen3_vl_moe_text",
    "Qwen3VLMoeTextModel",
    LlamaPattern(_attention, norms_heads=True, axes=_interleaved, mlp=_stacked_mlp),
    cuts=None,
)
"""Behind a vision encoder, and never without."""
QWEN_FORMS = (
    GGUFForm("qwen2", _qwen2, LAYER_NAMES),
    GGUFForm("qwen3", _qwen3, LAYER_NAMES),
    GGUFForm("qwen3moe", _qwen3_moe, LAYER_NAMES),
)
