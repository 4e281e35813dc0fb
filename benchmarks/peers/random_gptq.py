"""Writes a Llama-family checkpoint with random GPTQ weights of four bits in groups of 128, a file a layer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from benchmarks.checkpoint import VOCAB_SIZE
from benchmarks.peers.random_gguf import Shape
from benchmarks.peers.random_shards import Tensors, write_shards

_GROUP, _BITS = 128, 4
_CODES_A_WORD = 32 // _BITS
_SCALE = 0.02 / 4.6


def write_random_gptq(shape: Shape, out: Path, tokenizer_of: Path, seed: int = 0) -> Path:
    """Write the checkpoint with the tokenizer of `tokenizer_of`; return it. One that's there stays."""
    draw = torch.Generator().manual_seed(seed)
    layers, ends = partial(_layer, shape, draw), partial(_ends, shape, draw)
    return write_shards(out, tokenizer_of, _config(shape), layers, ends)


def _ends(shape: Shape, draw: torch.Generator) -> Tensors:
    hidden = shape.hidden
    return {
        "model.embed_tokens.weight": torch.randn(VOCAB_SIZE, hidden, generator=draw).mul_(0.02).bfloat16(),
        "lm_head.weight": torch.randn(VOCAB_SIZE, hidden, generator=draw).mul_(0.02).bfloat16(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }


def _layer(shape: Shape, draw: torch.Generator, layer: int) -> Tensors:
    hidden, inner = shape.hidden, shape.intermediate
    queries, values = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, values),
        "self_attn.v_proj": (hidden, values),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    prefix = f"model.layers.{layer}."
    tensors = {
        prefix + "input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        prefix + "post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for name, (num_in, num_out) in products.items():
        tensors |= {f"{prefix}{name}.{part}": one for part, one in _product(num_in, num_out, draw).items()}
    return tensors


def _product(num_in: int, num_out: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    groups = num_in // _GROUP
    low, high = -(2**31), 2**31
    return {
        "qweight": torch.randint(
            low, high, (num_in // _CODES_A_WORD, num_out), dtype=torch.int32, generator=draw
        ),
        "qzeros": torch.full((groups, num_out // _CODES_A_WORD), 0x77777777, dtype=torch.int32),
        "scales": torch.full((groups, num_out), _SCALE, dtype=torch.float16),
        "g_idx": torch.arange(num_in, dtype=torch.int32) // _GROUP,
    }


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "quantization_config": {
            "quant_method": "gptq",
            "bits": _BITS,
            "group_size": _GROUP,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": "gptq",
        },
    }
