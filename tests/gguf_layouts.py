"""How llama.cpp's converter lays out families whose tensors it changes, in numbers: tiny ones of each.

Written from the converter's side, tensor by tensor: nothing here is shared with what reads the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from transformers import (
    Glm4Config,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
)

from tests import checkpoints, hybrids

Array: TypeAlias = npt.NDArray[Any]
Named: TypeAlias = Iterator[tuple[str, Array]]

_BY_TURNS = ["linear_attention", "full_attention"] * 2
_LINEAR = {
    **{"num_hidden_layers": 4, "layer_types": _BY_TURNS},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 32},
}


@dataclass(frozen=True)
class Layout:
    """One family: its tiny config, its metadata beside the usual ones, its tensors."""

    architecture: str
    config: Callable[[], PreTrainedConfig]
    fields: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any, str, Array], Named]
    """Takes config, transformers' name within a layer, or of no layer, and numbers; yields the file's."""


def renamed(names: dict[str, str], name: str, data: Array) -> Named:
    stem, _, kind = name.rpartition(".")
    yield f"{names[stem]}.{kind}", data


ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ATTENTION = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
}
GATED = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}


def halves_to_pairs(data: Array, num_heads: int) -> Array:
    half = data.shape[0] // num_heads // 2
    return data.reshape(num_heads, 2, half, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def _rotated(config: Any, name: str, data: Array) -> Array:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2] if "." in name else ""
    return halves_to_pairs(data, heads[part]) if part in heads else data


# ---- Mixtral


def _mixtral(config: Any, name: str, data: Array) -> Named:
    experts = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
    names = (
        ENDS | ATTENTION | {"post_attention_layernorm": "ffn_norm", "block_sparse_moe.gate": "ffn_gate_inp"}
    )
    names |= {f"block_sparse_moe.experts.{part}": made for part, made in experts.items()}
    yield from renamed(names, name, _rotated(config, name, data))


def _mixtral_fields(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
    }


# ---- Phi-3, OLMo 2 and 3, GLM-4


def _phi3(_config: Any, name: str, data: Array) -> Named:
    names = ENDS | ATTENTION | GATED | {"post_attention_layernorm": "ffn_norm"}
    names |= {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
    yield from renamed(names, name, data)


def _phi3_fields(config: Any) -> dict[str, Any]:
    return {
        "attention.sliding_window": config.sliding_window or 0,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
    }


def _olmo(_config: Any, name: str, data: Array) -> Named:
    names = ENDS | ATTENTION | GATED
    names |= {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    yield from renamed(names, name, data)


def _olmo_fields(config: Any) -> dict[str, Any]:
    if getattr(config, "sliding_window", None) is None:
        return {}
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
    }


def _glm4(_config: Any, name: str, data: Array) -> Named:
    names = ENDS | ATTENTION | GATED | {"mlp.gate_up_proj": "ffn_up"}
    names |= {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    }
    yield from renamed(names, name, data)


def _glm4_fields(config: Any) -> dict[str, Any]:
    return {
        "rope.dimension_count": config.head_dim // 2,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }


# ---- Qwen3-Next and Qwen3.5


def _qwen_names(name: str) -> dict[str, str]:
    return {
        **ENDS,
        **ATTENTION,
        **GATED,
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.in_proj_ba": "ssm_ba",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
        **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    }


def _next(config: Any, name: str, data: Array) -> Named:
    if name == "linear_attn.A_log":
        yield "ssm_a", -np.exp(data)
        return
    if name == "linear_attn.dt_bias":
        yield "ssm_dt.bias", data
        return
    if name == "linear_attn.in_proj_qkvz.weight":
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        dim, each = config.linear_key_head_dim, values // keys * config.linear_value_head_dim
        heads = data.reshape(keys, 2 * dim + 2 * each, -1)
        query, key, value, gate = np.split(heads, np.cumsum([dim, dim, each]), axis=1)
        parts = [part.reshape(-1, data.shape[1]) for part in (query, key, value)]
        yield "attn_qkv.weight", np.concatenate(parts)
        yield "attn_gate.weight", gate.reshape(-1, data.shape[1])
        return
    if "conv1d" in name or "shared_expert_gate" in name:
        data = data.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        data = data + np.float32(1.0)
    yield from renamed(_qwen_names(name), name, data)


def _next_with_joined_inputs(config: Any, name: str, data: Array) -> Named:
    if name == "linear_attn.in_proj_qkvz.weight":
        yield "ssm_in.weight", data
    else:
        yield from _next(config, name, data)


def _tiled(config: Any, data: Array, axis: int, dim: int) -> Array:
    """Value heads, grouped by key head, as all first ones, then all second ones."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    shape = (*data.shape[:axis], keys, values // keys, dim, *data.shape[axis + 1 :])
    return data.reshape(shape).swapaxes(axis, axis + 1).reshape(data.shape)


def _three_five(config: Any, name: str, data: Array) -> Named:
    others, dim = 2 * config.linear_num_key_heads * config.linear_key_head_dim, config.linear_value_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        data = data.squeeze()
        data = np.concatenate([data[:others], _tiled(config, data[others:], 0, dim)])
    elif "in_proj_z" in name:
        data = _tiled(config, data, 0, dim)
    elif name.startswith("linear_attn.") and ("in_proj_" in name or "A_log" in name or "dt_bias" in name):
        data = _tiled(config, data, 0, 1)
    elif "linear_attn.out_proj" in name:
        data = _tiled(config, data, 1, dim)
    yield from _next(config, name, data)


def _qwen_fields(config: Any) -> dict[str, Any]:
    fields = {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim // 4,
        "full_attention_interval": 2,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }
    if getattr(config, "num_experts", 0):
        fields |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return fields


def _three_five_fields(config: Any) -> dict[str, Any]:
    return _qwen_fields(config) | {"rope.dimension_sections": [11, 11, 10, 0]}


# ---- LFM2, GPT-OSS, Granite 4


def _lfm2(_config: Any, name: str, data: Array) -> Named:
    names = ENDS | {
        "model.embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
        **{f"self_attn.{part}_layernorm": f"attn_{part}_norm" for part in "qk"},
        "self_attn.out_proj": "attn_output",
        **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
        **{"feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up"},
    }
    yield from renamed(names, name, data.squeeze(1) if name.startswith("conv.conv") else data)


def _lfm2_fields(config: Any) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [
            config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
        "vocab_size": config.vocab_size,
    }


def _gpt_oss(_config: Any, name: str, data: Array) -> Named:
    names = (
        ENDS | ATTENTION | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
    )
    if name == "self_attn.sinks":
        yield "attn_sinks.weight", data
    elif name == "mlp.experts.gate_up_proj":
        rows = data.swapaxes(1, 2)
        yield from (("ffn_gate_exps.weight", rows[:, ::2]), ("ffn_up_exps.weight", rows[:, 1::2]))
    elif name == "mlp.experts.gate_up_proj_bias":
        yield from (("ffn_gate_exps.bias", data[:, ::2]), ("ffn_up_exps.bias", data[:, 1::2]))
    elif name.startswith("mlp.experts.down_proj"):
        is_bias = name.endswith("_bias")
        yield f"ffn_down_exps.{'bias' if is_bias else 'weight'}", data if is_bias else data.swapaxes(1, 2)
    else:
        yield from renamed(names, name, data)


def _gpt_oss_fields(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.intermediate_size,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


def _granite(config: Any, name: str, data: Array) -> Named:
    names = (
        ENDS
        | ATTENTION
        | {
            "post_attention_layernorm": "ffn_norm",
            **{"mamba.in_proj": "ssm_in", "mamba.out_proj": "ssm_out", "mamba.conv1d": "ssm_conv1d"},
            "block_sparse_moe.router.layer": "ffn_gate_inp",
        }
    )
    suffix = "_shexp" if config.num_local_experts else ""
    if name == "mamba.A_log":
        yield "ssm_a", -np.exp(data)[:, None]
    elif name == "mamba.D":
        yield "ssm_d", data[:, None]
    elif name == "mamba.dt_bias":
        yield "ssm_dt.bias", data
    elif name == "mamba.norm.weight":
        yield "ssm_norm.weight", data.reshape(config.mamba_n_groups, -1)
    elif name == "mamba.conv1d.weight":
        yield "ssm_conv1d.weight", data.squeeze()
    elif "input_linear" in name:
        ending = "_exps" if "moe" in name else suffix
        gate, up = np.split(data, 2, axis=-2)
        yield from ((f"ffn_gate{ending}.weight", gate), (f"ffn_up{ending}.weight", up))
    elif "output_linear" in name:
        yield f"ffn_down{'_exps' if 'moe' in name else suffix}.weight", data
    else:
        yield from renamed(names, name, _rotated(config, name, data))


def _granite_fields(config: Any) -> dict[str, Any]:
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    fields = {
        "attention.head_count_kv": heads,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
    }
    if config.num_local_experts:
        fields |= {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
        }
    return fields


_SCALES = {
    **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    **{"residual_multiplier": 0.5, "logits_scaling": 2.0},
}


def _of(family: str, **overrides: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: hybrids.config_of(family, **overrides)


def _base(kind: Any, **overrides: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: kind(**checkpoints.base_fields(**overrides))


LAYOUTS: dict[str, Layout] = {
    "mixtral": Layout(
        "llama",
        _base(MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        _mixtral_fields,
        _mixtral,
    ),
    "phi3": Layout("phi3", _base(Phi3Config, original_max_position_embeddings=2048), _phi3_fields, _phi3),
    "phi3-windows": Layout("phi3", _base(Phi3Config, sliding_window=24), _phi3_fields, _phi3),
    "olmo2": Layout("olmo2", _base(Olmo2Config), _olmo_fields, _olmo),
    "olmo3": Layout(
        "olmo2",
        _base(
            Olmo3Config,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("sliding_attention", "full_attention")
            },
        ),
        _olmo_fields,
        _olmo,
    ),
    "glm4": Layout("glm4", _base(Glm4Config, head_dim=16, attention_bias=True), _glm4_fields, _glm4),
    "qwen3-next": Layout("qwen3next", _of("qwen3_next", **_LINEAR), _qwen_fields, _next),
    "qwen3-next-older": Layout(
        "qwen3next", _of("qwen3_next", **_LINEAR), _qwen_fields, _next_with_joined_inputs
    ),
    "qwen3.5": Layout("qwen35", _of("qwen3_5_text", **_LINEAR), _three_five_fields, _three_five),
    "qwen3.5-moe": Layout("qwen35moe", _of("qwen3_5_moe_text", **_LINEAR), _three_five_fields, _three_five),
    "lfm2": Layout("lfm2", _of("lfm2", block_auto_adjust_ff_dim=False), _lfm2_fields, _lfm2),
    "gpt-oss": Layout("gpt-oss", _of("gpt_oss"), _gpt_oss_fields, _gpt_oss),
    "granite": Layout(
        "granitehybrid",
        _of("granitemoehybrid", shared_intermediate_size=64, **_SCALES),
        _granite_fields,
        _granite,
    ),
    "granite-dense": Layout(
        "granitehybrid",
        _of(
            "granitemoehybrid",
            num_local_experts=0,
            shared_intermediate_size=64,
            position_embedding_type="rope",
        ),
        _granite_fields,
        _granite,
    ),
}
"""By family."""
