"""Tiny seeded checkpoints of every supported family (and some that must be refused), written to a directory.

Weights are random, untied, std 0.1. All share the byte-level tokenizer of `stemma.model.files.tiny`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers.modeling_layers import MtpModel

from stemma.model.files.tiny import build_tokenizer, randomize, save_checkpoint

SLIDING_WINDOW = 24


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def base_fields(**overrides: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "vocab_size": len(tokenizer()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer().eos_token_id,
        "pad_token_id": tokenizer().pad_token_id,
    }
    return base | overrides


def _deepseek(q_lora_rank: int | None) -> PreTrainedConfig:
    return DeepseekV3Config(
        **base_fields(
            num_hidden_layers=3,
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=32,
            q_lora_rank=q_lora_rank,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            num_mtp_layers=0,
        )
    )


def _deepseek_v2() -> PreTrainedConfig:
    return DeepseekV2Config(
        **base_fields(
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            kv_lora_rank=32,
            q_lora_rank=None,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        )
    )


def _qwen3_moe() -> PreTrainedConfig:
    return Qwen3MoeConfig(
        **base_fields(
            head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[]
        )
    )


def _gpt_oss() -> PreTrainedConfig:
    return GptOssConfig(
        **base_fields(
            head_dim=16,
            sliding_window=SLIDING_WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )


def _gemma3() -> PreTrainedConfig:
    return Gemma3TextConfig(
        **base_fields(
            head_dim=16,
            sliding_window=SLIDING_WINDOW,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        )
    )


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**base_fields()),
    "qwen2": lambda: Qwen2Config(**base_fields()),
    "qwen3": lambda: Qwen3Config(**base_fields(head_dim=16)),
    "qwen3-moe": _qwen3_moe,
    "smollm3": lambda: SmolLM3Config(**base_fields(num_hidden_layers=3, no_rope_layers=[1, 0, 1])),
    "seed-oss": lambda: SeedOssConfig(**base_fields(head_dim=16)),
    "mistral-sliding": lambda: MistralConfig(**base_fields(sliding_window=SLIDING_WINDOW)),
    "gemma2": lambda: Gemma2Config(
        **base_fields(
            head_dim=16, sliding_window=SLIDING_WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
        )
    ),
    "gemma3": _gemma3,
    "deepseek-v3": lambda: _deepseek(q_lora_rank=24),
    "deepseek-v3-no-q-lora": lambda: _deepseek(q_lora_rank=None),
    "deepseek-v2": _deepseek_v2,
    "gpt-oss": _gpt_oss,
}
"""Families whose logits must equal plain transformers."""

FAMILIES = tuple(CONFIGS)
MOE_FAMILIES = ("qwen3-moe", "deepseek-v3", "deepseek-v3-no-q-lora", "deepseek-v2", "gpt-oss")


def make_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # `randomize` keeps what vectors are initialized to: GPT-OSS draws its sinks
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    return model


def build(
    family: str,
    path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    generation: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of `family` into `path`; `overrides` are fields of its config."""
    config = CONFIGS[family]()
    for name, value in overrides.items():
        if not hasattr(config, name):
            raise AttributeError(f"{type(config).__name__} has no field {name}")
        setattr(config, name, value)
    model: Any = make_model(config, seed)
    return save_checkpoint(model.to(dtype), tokenizer(), path, generation)


def build_masked_lm(path: Path) -> Path:
    """Write an encoder (BertForMaskedLM): no causal LM."""
    config = BertConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    return save_checkpoint(BertForMaskedLM(config), tokenizer(), path)


MTP_LAYER = 3
"""Number of the layer for multi-token prediction in the checkpoints of `build_mtp`."""


def build_mtp(path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a DeepSeek-V3 checkpoint with a random MTP layer, named as in the published checkpoints."""
    build("deepseek-v3", path, seed=seed, dtype=dtype, num_mtp_layers=1, **overrides)
    main = AutoModelForCausalLM.from_pretrained(path)
    mtp = MtpModel(main, 1)
    randomize(mtp.layers, seed + 1)
    return add_mtp_weights(path, main, mtp.layers[0])


def add_mtp_weights(path: Path, main: PreTrainedModel, layer: torch.nn.Module) -> Path:
    """Add an `MtpLayer` of transformers to a checkpoint, with copies of the embedding and the output head."""
    prefix = f"model.layers.{main.config.num_hidden_layers}."
    tensors = load_file(path / "model.safetensors")
    dtype = tensors["lm_head.weight"].dtype
    for name, tensor in _published_names(layer.state_dict()).items():
        tensors[prefix + name] = tensor.to(dtype).contiguous()
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _published_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename an `MtpLayer`'s weights; the experts, which transformers joins, are cut apart."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if name == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                named[f"mlp.experts.{expert}.gate_proj.weight"] = gate
                named[f"mlp.experts.{expert}.up_proj.weight"] = up
        elif name == "mlp.experts.down_proj":
            for expert, down in enumerate(tensor):
                named[f"mlp.experts.{expert}.down_proj.weight"] = down
        else:
            named[name] = tensor
    return named
