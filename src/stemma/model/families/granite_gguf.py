"""Granite 4 hybrid, as GGUF files have it: gates and ups apart, queries and keys with pairs that rotate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stemma.errors import ModelError
from stemma.model.families.gguf import LAYER_NAMES, Fields, GGUFForm, base, count_layers, experts
from stemma.model.families.gguf_changes import (
    Change,
    Join,
    flat,
    rotated_heads,
    to_logarithm,
    with_channel,
)
from stemma.model.families.pattern import head_dim_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_GATED = ("gate", "up")
_DENSE, _ROUTED = "shared_mlp", "block_sparse_moe"


def _hybrid(fields: Fields) -> PreTrainedConfig:
    from transformers import GraniteMoeHybridConfig

    num_layers = count_layers(fields)
    kv_heads = fields.by_layer("attention.head_count_kv", num_layers)
    attends = [layer for layer, count in enumerate(kv_heads) if count]
    attention = tuple(f"blk.{layer}.attn_{name}" for layer in attends[:1] for name in "qk")
    most = max(kv_heads) or fields.whole("attention.head_count")
    config = base(fields, num_layers=num_layers, kv_heads=most, attention=attention)
    head_dim = config.pop("head_dim")
    if head_dim * config["num_attention_heads"] != config["hidden_size"]:
        raise ModelError(f"{fields.header.path}: heads of {head_dim} aren't those of a Granite 4")
    return GraniteMoeHybridConfig(
        architectures=["GraniteMoeHybridForCausalLM"],
        layer_types=["full_attention" if count else "linear_attention" for count in kv_heads],
        position_embedding_type="rope" if fields.get("rope.scaling.finetuned") else None,
        attention_multiplier=fields.number("attention.scale", head_dim**-0.5),
        embedding_multiplier=fields.number("embedding_scale", 1.0),
        residual_multiplier=fields.number("residual_scale", 1.0),
        logits_scaling=fields.number("logit_scale", 1.0),
        **config,
        **_mamba(fields, config["hidden_size"]),
        **_mlp(fields),
    )


def _mamba(fields: Fields, hidden: int) -> dict[str, Any]:
    heads, inner = fields.whole("ssm.time_step_rank"), fields.whole("ssm.inner_size")
    if inner % heads or inner % hidden:
        raise ModelError(
            f"{fields.header.path}: ssm.inner_size {inner} isn't made of {heads} heads, or no multiple of "
            f"{hidden}; download it again"
        )
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_n_groups": fields.whole("ssm.group_count"),
        "mamba_d_state": fields.whole("ssm.state_size"),
        "mamba_d_conv": fields.whole("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in fields.header.tensors),
        "mamba_proj_bias": False,
    }


def _mlp(fields: Fields) -> dict[str, Any]:
    width = fields.get("feed_forward_length")
    stated = fields.get("expert_shared_feed_forward_length")
    if not fields.get("expert_count"):
        fields.get("expert_used_count")  # of no experts: nothing
        shared = fields.shape("blk.0.ffn_up.weight")[0]
        routed = {"num_local_experts": 0, "intermediate_size": shared}
    else:
        num_experts, num_used, inner = experts(fields)
        shared = fields.shape("blk.0.ffn_up_shexp.weight")[0]
        routed = {
            **{"num_local_experts": num_experts, "num_experts_per_tok": num_used},
            "intermediate_size": inner,
        }
        if width not in (None, inner):
            raise ModelError(f"{fields.header.path}: feed_forward_length is {width}, experts have {inner}")
    if stated not in (None, shared):
        raise ModelError(
            f"{fields.header.path}: expert_shared_feed_forward_length is {stated}, the tensors have {shared}"
        )
    return {"shared_intermediate_size": shared, **routed}


def _change(name: str, config: Any) -> Change | None:
    if name == "mamba.A_log":
        return Change(numbers=to_logarithm)
    if name in ("mamba.D", "mamba.norm.weight"):
        return Change(numbers=flat)
    if name == "mamba.conv1d.weight":
        return Change(layout=with_channel, dimensions=2)
    return rotated_heads(name, config, head_dim_of(config))


_ATTENTION = {name: made for name, made in LAYER_NAMES.items() if not name.startswith("ffn")}
GRANITE_FORM = GGUFForm(
    "granitehybrid",
    _hybrid,
    _ATTENTION
    | {
        "ffn_norm": "post_attention_layernorm",
        **{f"ssm_{name}": f"mamba.{made}" for name, made in (("in", "in_proj"), ("out", "out_proj"))},
        **{f"ssm_{name}": f"mamba.{name}" for name in ("conv1d",)},
        **{"ssm_norm.weight": "mamba.norm.weight", "ssm_dt.bias": "mamba.dt_bias"},
        **{"ssm_a": "mamba.A_log", "ssm_d": "mamba.D"},
        "ffn_gate_inp": f"{_ROUTED}.router.layer",
        **{f"ffn_{part}": f"{_DENSE}.{part}" for part in _GATED},
        **{f"ffn_{part}_shexp": f"{_DENSE}.{part}" for part in _GATED},
        **dict.fromkeys(("ffn_down", "ffn_down_shexp"), f"{_DENSE}.output_linear"),
    },
    experts={f"ffn_{part}_exps": f"{_ROUTED}.experts.{{}}.{part}_proj" for part in (*_GATED, "down")},
    change=_change,
    joins={
        f"{_DENSE}.input_linear.weight": Join(tuple(f"{_DENSE}.{part}.weight" for part in _GATED)),
    },
)
