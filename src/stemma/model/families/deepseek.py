"""DeepSeek-V2 and V3 (R1, V3.1): one latent a token, mixtures of experts behind grouped routers.

The layout is for configs of transformers' own; how scores are scaled where angles are (YaRN), and the angles,
are computed by transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from stemma.model.families.family import Family
from stemma.model.families.layout import (
    Angles,
    ExpertRouter,
    Gated,
    Latent,
    LatentHeads,
    Layer,
    Linear,
    Mixture,
    ModelLayout,
    Norm,
    Rotation,
    RoutedBy,
    bounded_layers,
)
from stemma.model.families.pattern import GATED, MAX_HEAD_DIM, gated, layer_path, with_ends
from stemma.model.families.prediction import DEEPSEEK_PREDICTION
from stemma.model.families.rotary import has_fixed_angles

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever the config says of the others."""


def _v2_router(config: Any, linear: Linear) -> ExpertRouter | None:
    if config.topk_method not in ("greedy", "group_limited_greedy"):
        return None
    groups = (config.n_group, config.topk_group) if config.topk_method == "group_limited_greedy" else (0, 0)
    if groups != (0, 0) and not _divides(config, linear.outputs):
        return None
    scale = float(config.routed_scaling_factor)
    return ExpertRouter(linear, RoutedBy.SOFTMAX, config.num_experts_per_tok, False, scale, None, *groups)


def _v3_router(config: Any, linear: Linear) -> ExpertRouter | None:
    if not _divides(config, linear.outputs):
        return None
    return ExpertRouter(
        linear,
        RoutedBy.SIGMOID,
        config.num_experts_per_tok,
        bool(config.norm_topk_prob),
        float(config.routed_scaling_factor),
        f"{linear.name}.e_score_correction_bias",
        config.n_group,
        config.topk_group,
    )


def _divides(config: Any, num_experts: int) -> bool:
    groups, chosen = config.n_group, config.topk_group
    return bool(groups and chosen) and 0 < chosen <= groups and num_experts % groups == 0


def _v2_layout(config: Any, num_tensors: int) -> ModelLayout | None:
    return _layout(config, num_tensors, _v2_router, Rotation.PAIRS, bool(config.mlp_bias), _v2_code)


def _v3_layout(config: Any, num_tensors: int) -> ModelLayout | None:
    rotation = Rotation.PAIRS_TO_HALVES if config.rope_interleave else Rotation.HALVES
    return _layout(config, num_tensors, _v3_router, rotation, False, _v3_code)


def _v2_code() -> Any:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2

    return modeling_deepseek_v2, modeling_deepseek_v2.DeepseekV2RotaryEmbedding


def _v3_code() -> Any:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    return modeling_deepseek_v3, modeling_deepseek_v3.DeepseekV3RotaryEmbedding


def _layout(
    config: Any,
    num_tensors: int,
    route: Callable[[Any, Linear], ExpertRouter | None],
    rotation: Rotation,
    has_mlp_bias: bool,
    code: Callable[[], Any],
) -> ModelLayout | None:
    heads = LatentHeads(
        num_heads=config.num_attention_heads,
        rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        rotation=rotation,
    )
    first_routed = config.first_k_dense_replace or 0
    some = Linear("", config.n_routed_experts, config.hidden_size)
    routes = first_routed >= config.num_hidden_layers or route(config, some) is not None
    if not (routes and _is_native(config, heads)):
        return None
    scaling = code()[0].yarn_apply_mscale(config.rope_parameters, (heads.nope_dim + heads.rope_dim) ** -0.5)

    def mlp(number: int) -> Gated | Mixture:
        path, hidden = f"{layer_path(number)}.mlp", config.hidden_size
        biased = GATED if has_mlp_bias else ()
        if number < first_routed:
            return gated(path, hidden, config.intermediate_size, biased)
        router = route(config, Linear(f"{path}.gate", config.n_routed_experts, hidden))
        assert router is not None
        width = config.moe_intermediate_size
        experts = tuple(
            gated(f"{path}.experts.{expert}", hidden, width) for expert in range(config.n_routed_experts)
        )
        shared = gated(f"{path}.shared_experts", hidden, width * config.n_shared_experts, biased)
        return Mixture(router, experts, shared)

    layers = bounded_layers(
        lambda number: _layer(config, heads, layer_path(number), mlp(number), scaling),
        config.num_hidden_layers,
        num_tensors,
    )
    return None if layers is None else with_ends(config, layers, heads, partial(_angles, config, code))


def _layer(config: Any, heads: LatentHeads, path: str, mlp: Gated | Mixture, scaling: float) -> Layer:
    attention, hidden, eps = f"{path}.self_attn", config.hidden_size, float(config.rms_norm_eps)
    query_width, rank = heads.num_heads * (heads.nope_dim + heads.rope_dim), config.q_lora_rank
    has_bias = bool(config.attention_bias)
    latent = Linear(f"{attention}.kv_a_proj_with_mqa", heads.rank + heads.rope_dim, hidden, has_bias)
    if rank is None:
        query = Linear(f"{attention}.q_proj", query_width, hidden)
    else:
        query = Linear(f"{attention}.q_a_proj", rank, hidden, has_bias)
    expanded = heads.num_heads * (heads.nope_dim + heads.value_dim)
    return Layer(
        inputs=(query, latent),
        output=Linear(f"{attention}.o_proj", hidden, heads.num_heads * heads.value_dim, has_bias),
        mlp=mlp,
        input_norm=Norm(f"{path}.input_layernorm", hidden, eps),
        post_norm=Norm(f"{path}.post_attention_layernorm", hidden, eps),
        scaling=scaling,
        latent=Latent(
            norm=Norm(f"{attention}.kv_a_layernorm", heads.rank, _LATENT_EPS),
            projection=Linear(f"{attention}.kv_b_proj", expanded, heads.rank),
            expand=None if rank is None else Linear(f"{attention}.q_b_proj", query_width, rank),
            query_norm=None if rank is None else Norm(f"{attention}.q_a_layernorm", rank, _LATENT_EPS),
        ),
    )


def _is_native(config: Any, heads: LatentHeads) -> bool:
    """Whether the native step computes layers of such sizes, activations and angles."""
    if config.hidden_act != "silu" or not has_fixed_angles(config):
        return False
    if config.q_lora_rank is None and config.attention_bias:
        return False  # of two products that are one, one has a bias
    sizes = (config.hidden_size, config.intermediate_size, config.moe_intermediate_size, heads.rank)
    others = (heads.nope_dim, heads.rope_dim, heads.value_dim, config.q_lora_rank or 2)
    is_even = not any(size % 2 for size in (*sizes, *others))
    return is_even and 0 < heads.rank + heads.rope_dim <= MAX_HEAD_DIM


def _angles(config: Any, code: Callable[[], Any]) -> Angles:
    angles: Angles = code()[1](config)
    return angles


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", own_layout=_v2_layout)
DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", own_layout=_v3_layout, prediction=DEEPSEEK_PREDICTION
)
_INDEXED = frozenset({"indexed_attention"})
SPARSE = (
    Family("deepseek_v32", "DeepseekV32ForCausalLM", cuts=None, layer_types=_INDEXED),
    Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", cuts=None, layer_types=_INDEXED),
)
"""Families whose queries see the tokens that an indexer chooses."""

DEEPSEEK_V4 = Family(
    "deepseek_v4",
    "DeepseekV4ForCausalLM",
    cuts=None,
    layer_types=frozenset({"compressed_sparse_attention", "heavily_compressed_attention"}),
)
"""Its layers keep a window of tokens, and compressed entries of all."""
