"""Writes a GPT-OSS checkpoint with random experts in MXFP4, as OpenAI publishes it, a file a layer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from benchmarks.checkpoint import VOCAB_SIZE
from benchmarks.peers.random_gguf import Shape
from benchmarks.peers.random_shards import Tensors, write_shards

_GROUP = 32
_DEVIATION = 0.02
_EXPONENT = 127 - 7
"""Levels deviate by some 3, so weights do by 0.02."""


def write_random_mxfp4(shape: Shape, out: Path, tokenizer_of: Path, seed: int = 0) -> Path:
    """Write the checkpoint with the tokenizer of `tokenizer_of`; return it. One that's there stays."""
    draw = torch.Generator().manual_seed(seed)
    layers, ends = partial(_layer, shape, draw), partial(_ends, shape, draw)
    return write_shards(out, tokenizer_of, _config(shape), layers, ends)


def _random(draw: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=draw).mul_(_DEVIATION).bfloat16()


def _ends(shape: Shape, draw: torch.Generator) -> Tensors:
    return {
        "model.embed_tokens.weight": _random(draw, VOCAB_SIZE, shape.hidden),
        "lm_head.weight": _random(draw, VOCAB_SIZE, shape.hidden),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
    }


def _layer(shape: Shape, draw: torch.Generator, layer: int) -> Tensors:
    hidden, inner, experts = shape.hidden, shape.intermediate, shape.num_experts
    queries, values = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    found: Tensors = {
        "input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "self_attn.sinks": _random(draw, shape.num_heads),
    }
    for name, outputs, inputs in (
        ("self_attn.q_proj", queries, hidden),
        ("self_attn.k_proj", values, hidden),
        ("self_attn.v_proj", values, hidden),
        ("self_attn.o_proj", hidden, queries),
        ("mlp.router", experts, hidden),
    ):
        found |= {f"{name}.weight": _random(draw, outputs, inputs), f"{name}.bias": _random(draw, outputs)}
    for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        groups = (experts, outputs, inputs // _GROUP)
        codes = torch.randint(0, 256, (*groups, _GROUP // 2), dtype=torch.uint8, generator=draw)
        found |= {
            f"mlp.experts.{name}_blocks": codes,
            f"mlp.experts.{name}_scales": torch.full(groups, _EXPONENT, dtype=torch.uint8),
            f"mlp.experts.{name}_bias": _random(draw, experts, outputs),
        }
    return {f"model.layers.{layer}.{name}": tensor for name, tensor in found.items()}


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "quantization_config": {"quant_method": "mxfp4"},
    }
