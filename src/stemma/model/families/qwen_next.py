"""Qwen3-Next and Qwen3.5: Gated DeltaNet in most layers, gated attention in the others; dense or mixtures.

Their norms keep weights less 1, queries come with gates head by head, a part of each head is rotated, and
shared experts count by a gate of their own.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

from stemma.model.families.cuts import delta_rule_cuts
from stemma.model.families.family import Family
from stemma.model.families.layout import (
    Angles,
    ExpertRouter,
    Gated,
    GroupedHeads,
    Layer,
    Linear,
    Mixture,
    ModelLayout,
    Norm,
    Recurrent,
    RecurrentKind,
    RoutedBy,
    bounded_layers,
)
from stemma.model.families.pattern import MAX_HEAD_DIM, gated, head_dim_of, layer_path
from stemma.model.families.prediction import QWEN_3_5_PREDICTION, QWEN_NEXT_PREDICTION
from stemma.model.families.rotary import RotaryAngles, has_fixed_angles

_TYPES = frozenset({"linear_attention", "full_attention"})


def _layout(config: Any, num_tensors: int, *, is_joined: bool) -> ModelLayout | None:
    """Return the layout; `is_joined`: the recurrent layers' inputs are two tensors, head by head."""
    if config.num_hidden_layers > num_tensors or not _is_native(config):
        return None
    layers = bounded_layers(
        lambda number: _layer(config, number, is_joined=is_joined), config.num_hidden_layers, num_tensors
    )
    if layers is None:
        return None
    head_dim = head_dim_of(config)
    rotary_dim = int(head_dim * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
    vocabulary, hidden = config.vocab_size, config.hidden_size
    return ModelLayout(
        layers=layers,
        heads=GroupedHeads(config.num_attention_heads, config.num_key_value_heads, head_dim, rotary_dim),
        embedding=Linear("model.embed_tokens", vocabulary, hidden),
        norm=_norm(config, "model.norm", hidden),
        head=None if config.tie_word_embeddings else Linear("lm_head", vocabulary, hidden),
        angles=partial(_angles, config, head_dim),
    )


def _is_native(config: Any) -> bool:
    if config.hidden_act != "silu" or not has_fixed_angles(config, may_be_partial=True):
        return False
    if config.attention_bias or len(config.layer_types) != config.num_hidden_layers:
        return False
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    values, keys = config.linear_num_value_heads, config.linear_num_key_heads
    if min(kv_heads, keys) <= 0 or heads % kv_heads or values % keys or config.linear_conv_kernel_dim > 16:
        return False
    head_dim = head_dim_of(config)
    widths = (config.hidden_size, head_dim, values * config.linear_value_head_dim)
    is_even = not any(size % 2 for size in widths)
    known = set(config.layer_types) <= _TYPES and config.linear_key_head_dim <= MAX_HEAD_DIM
    return is_even and known and 0 < head_dim <= MAX_HEAD_DIM


def _norm(config: Any, name: str, size: int) -> Norm:
    return Norm(name, size, float(config.rms_norm_eps), is_centered=True)


def _layer(config: Any, number: int, *, is_joined: bool) -> Layer:
    path, hidden = layer_path(number), config.hidden_size
    make = _attention if config.layer_types[number] == "full_attention" else _delta
    return make(
        config,
        path,
        mlp=_mlp(config, number),
        input_norm=_norm(config, f"{path}.input_layernorm", hidden),
        post_norm=_norm(config, f"{path}.post_attention_layernorm", hidden),
        is_joined=is_joined,
    )


def _attention(config: Any, path: str, *, is_joined: bool, **parts: Any) -> Layer:
    hidden, dim = config.hidden_size, head_dim_of(config)
    heads, kv = config.num_attention_heads, config.num_key_value_heads * dim
    attention = f"{path}.self_attn"
    queries = [head * 2 * dim + at for head in range(heads) for at in range(dim)]
    return Layer(
        inputs=(
            Linear(f"{attention}.q_proj", 2 * heads * dim, hidden),
            Linear(f"{attention}.k_proj", kv, hidden),
            Linear(f"{attention}.v_proj", kv, hidden),
        ),
        output=Linear(f"{attention}.o_proj", hidden, heads * dim),
        scaling=dim**-0.5,
        head_norms=(_norm(config, f"{attention}.q_norm", dim), _norm(config, f"{attention}.k_norm", dim)),
        has_gates=True,
        order=(
            *queries,
            *range(2 * heads * dim, 2 * heads * dim + 2 * kv),
            *(query + dim for query in queries),
        ),
        **parts,
    )


def _delta(config: Any, path: str, *, is_joined: bool, **parts: Any) -> Layer:
    hidden, mixer = config.hidden_size, f"{path}.linear_attn"
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    keys, values = key_heads * key_dim, heads * value_dim
    convolved = 2 * keys + values
    joined = (("in_proj_qkvz", convolved + values), ("in_proj_ba", 2 * heads))
    apart = (
        *(("in_proj_qkv", convolved), ("in_proj_z", values)),
        *(("in_proj_b", heads), ("in_proj_a", heads)),
    )
    return Layer(
        inputs=tuple(
            Linear(f"{mixer}.{name}", size, hidden) for name, size in (joined if is_joined else apart)
        ),
        output=Linear(f"{mixer}.out_proj", hidden, values),
        scaling=1.0,
        order=_by_kind(key_heads, heads // key_heads, key_dim, value_dim) if is_joined else None,
        recurrent=Recurrent(
            kind=RecurrentKind.DELTA_RULE,
            path=mixer,
            heads=heads,
            key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_width=config.linear_conv_kernel_dim,
            norm=Norm(f"{mixer}.norm", value_dim, float(config.rms_norm_eps)),
            norm_dim=value_dim,
            conv_at=0,
            gate_at=convolved,
            beta_at=convolved + values,
            step_at=convolved + values + heads,
        ),
        **parts,
    )


def _by_kind(groups: int, each: int, key_dim: int, value_dim: int) -> tuple[int, ...]:
    """Return the rows of both inputs, which lie head by head, by kind: q, k, v, gates, b and a."""
    first = rows_by_kind(groups, each, key_dim, value_dim)
    behind = len(first)
    second = [
        range(behind + (2 * group + kind) * each, behind + (2 * group + kind + 1) * each)
        for kind in range(2)
        for group in range(groups)
    ]
    return tuple(chain(first, *second))


def rows_by_kind(groups: int, each: int, key_dim: int, value_dim: int) -> list[int]:
    """Return the rows of ``in_proj_qkvz``, which lie head by head, by kind: q, k, v and gates.

    `each`: value heads of a key head, of which there are `groups`.
    """
    values = each * value_dim
    sizes = (key_dim, key_dim, values, values)
    stride = sum(sizes)
    starts = (0, key_dim, 2 * key_dim, 2 * key_dim + values)
    return [
        row
        for start, size in zip(starts, sizes, strict=True)
        for group in range(groups)
        for row in range(group * stride + start, group * stride + start + size)
    ]


def _mlp(config: Any, number: int) -> Gated | Mixture:
    path, hidden = f"{layer_path(number)}.mlp", config.hidden_size
    num_experts = getattr(config, "num_experts", 0)
    is_routed = num_experts > 0 and number not in getattr(config, "mlp_only_layers", ())
    if not is_routed or (number + 1) % getattr(config, "decoder_sparse_step", 1):
        return gated(path, hidden, config.intermediate_size)
    router = ExpertRouter(
        Linear(f"{path}.gate", num_experts, hidden),
        RoutedBy.ROUNDED_SOFTMAX,
        config.num_experts_per_tok,
        bool(getattr(config, "norm_topk_prob", True)),
    )
    width = config.moe_intermediate_size
    return Mixture(
        router,
        tuple(gated(f"{path}.experts.{expert}", hidden, width) for expert in range(num_experts)),
        gated(f"{path}.shared_expert", hidden, config.shared_expert_intermediate_size),
        Linear(f"{path}.shared_expert_gate", 1, hidden),
    )


def _angles(config: Any, head_dim: int) -> Angles:
    return RotaryAngles(config, head_dim)


def _next(config: Any, num_tensors: int) -> ModelLayout | None:
    return _layout(config, num_tensors, is_joined=True)


def _three_five(config: Any, num_tensors: int) -> ModelLayout | None:
    return _layout(config, num_tensors, is_joined=False)


QWEN_NEXT = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        own_layout=_next,
        cuts=delta_rule_cuts,
        prediction=QWEN_NEXT_PREDICTION,
    ),
    Family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        own_layout=_three_five,
        cuts=delta_rule_cuts,
        prediction=QWEN_3_5_PREDICTION,
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        own_layout=_three_five,
        cuts=delta_rule_cuts,
        prediction=QWEN_3_5_PREDICTION,
    ),
)
