"""Granite 4 hybrid and Bamba: Mamba 2 in most layers, attention in the others; dense or mixtures.

Granite scales embeddings, what layers add, scores and logits, may know no positions, and keeps gates and ups,
and all experts of a layer, in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

from stemma.model.families.cuts import CutRun, Cuts, Mamba2Sizes, mamba2_cuts
from stemma.model.families.family import Apart, Family
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
    Piece,
    Recurrent,
    RecurrentKind,
    RoutedBy,
    bounded_layers,
)
from stemma.model.families.pattern import MAX_HEAD_DIM, gated, head_dim_of, layer_path
from stemma.model.families.rotary import RotaryAngles, has_fixed_angles

_MOST_EXPERTS = 1024
"""They are pieces of few tensors, whose number doesn't bound them."""
_TYPES = frozenset({"linear_attention", "full_attention"})


_MakeExperts: TypeAlias = Callable[[Any, str], tuple[Gated, ...]]
"""Takes a config and the path of a mixture."""


def _granite(config: Any, num_tensors: int) -> ModelLayout | None:
    return _granite_of(config, num_tensors, _stacked_experts)


def _granite_of(config: Any, num_tensors: int, make: _MakeExperts) -> ModelLayout | None:
    rotates = config.position_embedding_type == "rope"
    scaling = float(config.attention_multiplier)
    return _layout(
        config,
        num_tensors,
        types=config.layer_types,
        rotates=rotates,
        scaling=scaling,
        mlp=lambda path: _granite_mlp(config, path, make),
        norms=("post_attention_layernorm", "model.norm"),
        scales=(config.embedding_multiplier, config.residual_multiplier, config.logits_scaling),
    )


def _granite_apart(config: Any, num_tensors: int) -> ModelLayout | None:
    return _granite_of(config, num_tensors, _experts_apart)


def _bamba(config: Any, num_tensors: int) -> ModelLayout | None:
    if getattr(config, "mlp_bias", False):
        return None
    return _layout(
        config,
        num_tensors,
        types=config.layers_block_type,
        rotates=True,
        scaling=head_dim_of(config) ** -0.5,
        mlp=lambda path: gated(f"{path}.feed_forward", config.hidden_size, config.intermediate_size),
        norms=("pre_ff_layernorm", "model.final_layernorm"),
        scales=(1.0, 1.0, 1.0),
    )


def _layout(
    config: Any,
    num_tensors: int,
    *,
    types: list[str],
    rotates: bool,
    scaling: float,
    mlp: Callable[[str], Gated | Mixture],
    norms: tuple[str, str],
    scales: tuple[float, float, float],
) -> ModelLayout | None:
    num_layers = config.num_hidden_layers
    if num_layers > num_tensors or len(types) != num_layers or not set(types) <= _TYPES:
        return None
    if not _is_native(config, rotates=rotates):
        return None

    def layer(number: int) -> Layer:
        path = layer_path(number)
        parts: dict[str, Any] = {
            "mlp": mlp(path),
            "input_norm": _norm(config, f"{path}.input_layernorm"),
            "post_norm": _norm(config, f"{path}.{norms[0]}"),
        }
        if types[number] == "linear_attention":
            return _mamba(config, f"{path}.mamba", **parts)
        return _attention(config, f"{path}.self_attn", rotates=rotates, scaling=scaling, **parts)

    layers = bounded_layers(layer, num_layers, num_tensors)
    if layers is None:
        return None
    dim, vocabulary, hidden = head_dim_of(config), config.vocab_size, config.hidden_size
    rotary_dim = int(dim * _partial_factor(config)) if rotates else dim
    return ModelLayout(
        layers=layers,
        heads=GroupedHeads(config.num_attention_heads, config.num_key_value_heads, dim, rotary_dim),
        embedding=Linear("model.embed_tokens", vocabulary, hidden),
        norm=_norm(config, norms[1]),
        head=None if config.tie_word_embeddings else Linear("lm_head", vocabulary, hidden),
        angles=partial(_angles, config, dim),
        embedding_scale=float(scales[0]),
        residual_scale=float(scales[1]),
        logits_divisor=float(scales[2]),
    )


def _partial_factor(config: Any) -> float:
    return float(config.rope_parameters.get("partial_rotary_factor") or 1.0)


def _is_native(config: Any, *, rotates: bool) -> bool:
    if config.hidden_act != "silu" or config.attention_bias or config.mamba_proj_bias:
        return False
    if getattr(config, "num_local_experts", 0) > _MOST_EXPERTS:
        return False
    if rotates and not has_fixed_angles(config, may_be_partial=True):
        return False
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    groups, mamba_heads = config.mamba_n_groups, config.mamba_n_heads
    if min(kv_heads, groups) <= 0 or heads % kv_heads or mamba_heads % groups:
        return False
    inner = mamba_heads * config.mamba_d_head
    dim = head_dim_of(config)
    sizes = (config.hidden_size, config.intermediate_size, inner, dim)
    if any(size % 2 for size in sizes) or inner % groups or config.mamba_d_conv > 16:
        return False
    fits = int(config.mamba_expand * config.hidden_size) == inner
    return fits and config.mamba_d_state <= MAX_HEAD_DIM and 0 < dim <= MAX_HEAD_DIM


def _norm(config: Any, name: str) -> Norm:
    return Norm(name, config.hidden_size, float(config.rms_norm_eps))


def _attention(config: Any, path: str, *, rotates: bool, scaling: float, **parts: Any) -> Layer:
    hidden, dim = config.hidden_size, head_dim_of(config)
    heads, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return Layer(
        inputs=(
            Linear(f"{path}.q_proj", heads, hidden),
            Linear(f"{path}.k_proj", kv, hidden),
            Linear(f"{path}.v_proj", kv, hidden),
        ),
        output=Linear(f"{path}.o_proj", hidden, heads),
        scaling=scaling,
        rotates=rotates,
        **parts,
    )


def _mamba(config: Any, path: str, **parts: Any) -> Layer:
    hidden, heads, groups = config.hidden_size, config.mamba_n_heads, config.mamba_n_groups
    inner = heads * config.mamba_d_head
    convolved = inner + 2 * groups * config.mamba_d_state
    return Layer(
        inputs=(Linear(f"{path}.in_proj", inner + convolved + heads, hidden),),
        output=Linear(f"{path}.out_proj", hidden, inner),
        scaling=1.0,
        recurrent=Recurrent(
            kind=RecurrentKind.MAMBA2,
            path=path,
            heads=heads,
            key_heads=groups,
            key_dim=config.mamba_d_state,
            value_dim=config.mamba_d_head,
            conv_width=config.mamba_d_conv,
            has_conv_bias=bool(config.mamba_conv_bias),
            has_skip=True,
            norm=Norm(f"{path}.norm", inner, float(config.rms_norm_eps)),
            norm_dim=inner // groups,
            gates_first=True,
            gate_at=0,
            conv_at=inner,
            step_at=inner + convolved,
            step_limits=_step_limits(config),
        ),
        **parts,
    )


def _step_limits(config: Any) -> tuple[float, float]:
    least, most = config.time_step_limit
    return float(least), float(most)


def _granite_mlp(config: Any, path: str, make: _MakeExperts) -> Gated | Mixture:
    hidden, shared = config.hidden_size, config.shared_intermediate_size
    dense = _in_one(f"{path}.shared_mlp", hidden, shared)
    num_experts = config.num_local_experts
    if not num_experts:
        return dense
    router = ExpertRouter(
        Linear(f"{path}.block_sparse_moe.router.layer", num_experts, hidden),
        RoutedBy.ROUNDED_SOFTMAX,  # of the chosen alone, which is what normalizing gives
        config.num_experts_per_tok,
        normalize=True,
    )
    return Mixture(router, make(config, f"{path}.block_sparse_moe"), dense)


def _stacked_experts(config: Any, path: str) -> tuple[Gated, ...]:
    sizes, count = (config.hidden_size, config.intermediate_size), config.num_local_experts
    return tuple(_in_one(path, *sizes, (count, expert)) for expert in range(count))


def _experts_apart(config: Any, path: str) -> tuple[Gated, ...]:
    sizes = config.hidden_size, config.intermediate_size
    return tuple(gated(f"{path}.experts.{expert}", *sizes) for expert in range(config.num_local_experts))


def _stack(gates: torch.Tensor, ups: torch.Tensor, downs: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_linear.weight": torch.cat([gates, ups], dim=1), "output_linear.weight": downs}


def _in_one(path: str, hidden: int, width: int, expert: tuple[int, int] | None = None) -> Gated:
    """Return a gated layer whose gate and up are one tensor; `expert`: of how many it is which."""
    stack = () if expert is None else (expert[0],)
    number = None if expert is None else expert[1]
    joined = (*stack, 2 * width, hidden)
    down = None if expert is None else Piece((*stack, hidden, width), 0, number)
    return Gated(
        Linear(f"{path}.input_linear", width, hidden, piece=Piece(joined, 0, number)),
        Linear(f"{path}.input_linear", width, hidden, piece=Piece(joined, width, number)),
        Linear(f"{path}.output_linear", hidden, width, piece=down),
    )


def _angles(config: Any, head_dim: int) -> Angles:
    return RotaryAngles(config, head_dim)


def _mamba_cuts(config: Any, num_ranks: int) -> Cuts:
    heads = config.mamba_n_heads, config.mamba_d_head
    return mamba2_cuts(Mamba2Sizes("mamba", *heads, config.mamba_n_groups, config.mamba_d_state), num_ranks)


def _granite_cuts(config: Any, num_ranks: int) -> Cuts:
    """Return the cuts; a gate and an up that are one tensor are divided each by itself."""
    mamba = _mamba_cuts(config, num_ranks)
    shared, inner = CutRun(config.shared_intermediate_size), CutRun(config.intermediate_size)
    experts = "block_sparse_moe"
    return replace(
        mamba,
        columns={
            **mamba.columns,
            "shared_mlp.input_linear": (shared, shared),
            f"{experts}.input_linear": (inner, inner),
        },
        rows=mamba.rows | {"shared_mlp.output_linear", f"{experts}.output_linear"},
        stacks=frozenset({f"{experts}.input_linear", f"{experts}.output_linear"}),
    )


GRANITE = (
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        own_layout=_granite,
        apart=Apart(_granite_apart, _stack),
        cuts=_granite_cuts,
    ),
    Family("bamba", "BambaForCausalLM", own_layout=_bamba, cuts=_mamba_cuts),
)
