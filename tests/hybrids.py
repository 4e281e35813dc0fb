"""Tiny seeded checkpoints of models whose layers keep different things: recurrent ones, two shapes of KV."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig

from stemma.model.files.tiny import save_checkpoint
from tests.checkpoints import base_fields, make_model, tokenizer

_DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 12},
}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
}

FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_DELTA,
        **_MOE,
        "num_hidden_layers": 3,
        "layer_types": _MIXED,
        "shared_expert_intermediate_size": 32,
        "head_dim": 16,
    },
    "qwen3_5_text": {**_DELTA, "num_hidden_layers": 3, "layer_types": _MIXED, "head_dim": 16},
    "qwen3_5_moe_text": {
        **_DELTA,
        **_MOE,
        "num_hidden_layers": 3,
        "layer_types": _MIXED,
        "shared_expert_intermediate_size": 32,
        "head_dim": 16,
    },
    "olmo_hybrid": {
        "num_hidden_layers": 3,
        "layer_types": _MIXED,
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 12},
    },
    "kimi_linear": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "layer_types": _MIXED,
        **{"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
        **{"v_head_dim": 16, "head_dim": 16, "num_experts_per_tok": 2, "num_local_experts": 4},
        **{"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
        **{"linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}},
    },
    "bamba": {**_MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA2,
        "num_hidden_layers": 3,
        "layer_types": _MIXED,
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    },
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128, "num_hidden_layers": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "head_dim": 16},
    },
    "jamba": {
        "num_hidden_layers": 4,
        **{"attn_layer_period": 4, "attn_layer_offset": 1, "expert_layer_period": 2},
        **{"expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2},
        **{"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8},
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        **_MOE,
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "minimax": {
        "num_hidden_layers": 3,
        "layer_types": _MIXED,
        **{"num_local_experts": 2, "head_dim": 16},
    },
    "mamba": {"num_hidden_layers": 2, "state_size": 8},
    "falcon_mamba": {"num_hidden_layers": 2, "state_size": 8},
    "mamba2": {"num_hidden_layers": 2, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2},
}
"""By `model_type`: fields in which a tiny model differs from `base_fields`."""
FAMILIES = tuple(FIELDS)
MIXED_ATTENTION: dict[str, dict[str, Any]] = {
    "llama4_text": {
        **{"num_hidden_layers": 4, "head_dim": 12, "num_key_value_heads": 1, "attention_chunk_size": 48},
        **{"num_local_experts": 2, "no_rope_layers": [1, 1, 1, 0], "intermediate_size_mlp": 96},
    },
    "gemma3_text": {
        **{"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
        **{"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    },
    "gpt_oss": {
        **_MOE,
        **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        **{"head_dim": 16, "sliding_window": 24, "num_local_experts": 4},
    },
    "gemma4_text": {
        **{"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
        **{"head_dim": 16, "global_head_dim": 32, "sliding_window": 24},
        **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 512},
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        **{"head_dim": 16, "v_head_dim": 12, "swa_head_dim": 24, "swa_v_head_dim": 16},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window": 24},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    },
}
"""Layers of two kinds of attention, that keep KV of two shapes or see only a chunk of the context."""
_INDEXED = {
    **{"num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8},
    **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    **{
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
    **{"index_topk": 20, "index_head_dim": 16, "index_n_heads": 12},
}
SPARSE: dict[str, dict[str, Any]] = {
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED | {"indexer_types": ["full", "shared", "full"]},
}
"""Each query sees the 20 tokens that an indexer chooses."""
_COMPRESSED = {
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32},
    **{"q_lora_rank": 24, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 24},
    **{"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "num_hash_layers": 2},
    **{"index_topk": 12, "index_head_dim": 16, "index_n_heads": 12},
    "layer_types": [
        *("sliding_attention", "compressed_sparse_attention"),
        *("heavily_compressed_attention", "compressed_sparse_attention"),
    ],
}
COMPRESSED: dict[str, dict[str, Any]] = {
    "deepseek_v4": _COMPRESSED | {"compress_rate_csa": 4, "compress_rate_hca": 16},
}
"""Each query sees a window, and entries that stand for 4 tokens or 16; of those of 4 the 12 it chooses."""
ALL = (*FAMILIES, *MIXED_ATTENTION, *SPARSE, *COMPRESSED)
REFUSED: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {"num_hidden_layers": 3, "head_dim": 16, "lru_width": 64}
}
"""Recurrent, and not served."""


def config_of(family: str, **overrides: Any) -> PreTrainedConfig:
    """Return the tiny config of a `model_type`."""
    fields = base_fields() | (FIELDS | MIXED_ATTENTION | SPARSE | COMPRESSED | REFUSED)[family] | overrides
    if family in ("mamba", "falcon_mamba", "mamba2"):
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            fields.pop(name, None)
    return AutoConfig.for_model(family, **fields)


def build_mtp(path: Path, family: str = "qwen3_next", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint of Qwen's with a random MTP layer, named as in the published checkpoints."""
    build(family, path, seed=seed, **overrides)
    config = config_of(family, **{"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    alone: Any = make_model(config, seed + 1)
    save_checkpoint(alone, tokenizer(), path / "mtp")
    tensors, layer = load_file(path / "model.safetensors"), load_file(path / "mtp" / "model.safetensors")
    shutil.rmtree(path / "mtp")
    for name, tensor in layer.items():
        if name.startswith("model.layers.0.") or name == "model.norm.weight":
            tensors[name.replace("model.", "mtp.", 1)] = tensor
    hidden, generator = config.hidden_size, torch.Generator().manual_seed(seed)
    tensors["mtp.fc.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    for kind in ("embedding", "hidden"):
        tensors[f"mtp.pre_fc_norm_{kind}.weight"] = 0.1 * torch.randn(hidden, generator=generator)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def build(
    family: str,
    path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    generation: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of a `model_type` into `path`."""
    model: Any = make_model(config_of(family, **overrides), seed)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # else all tokens go to expert 0, twice
            count = model.config.n_routed_experts
            first = torch.randint(count, buffer.shape[:1], generator=torch.Generator().manual_seed(seed))
            buffer.copy_((first[:, None] + torch.arange(buffer.shape[1])) % count)
    return save_checkpoint(model.to(dtype), tokenizer(), path, generation)
