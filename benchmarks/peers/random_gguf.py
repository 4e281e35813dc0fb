"""Writes GGUF files of large models with random blocks, without the model in bf16 that they would come from.

Speed and memory depend on shapes and types, not on values; a quantizer would need three times the file's
bytes. Types are those that llama.cpp's Q4_K_M gives: Q6_K for the head and for half of the value and down
matrices, Q4_K for the rest; or those of its Q4_0: Q6_K for the head, Q4_0 for the rest. Scales are chosen so
that weights have a mean near zero and a deviation of 0.02.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt

from benchmarks.checkpoint import VOCAB_SIZE
from benchmarks.peers.gguf import add_tokenizer

Kind = Literal["Q4_K_M", "Q4_0"]
Blocks = npt.NDArray[np.uint8]
_DEVIATION = 0.02
_Q4_K, _Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
_Q4_0 = gguf.GGMLQuantizationType.Q4_0
_Q4_0_SCALE = _DEVIATION / 4.6
"""Codes deviate by 4.6."""
_Q4_K_SCALE = _DEVIATION / 147
"""Six-bit scales are 32 in the mean and codes deviate by 4.6."""
_Q6_K_SCALE = _DEVIATION / 1370
"""Signed eight-bit scales deviate by 74, codes by 18.5."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes; `num_experts` 0: dense."""

    family: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    experts_per_token: int = 0


EIGHT_BILLION = Shape("llama", 32, 4096, 14336, 32, 8, 128)
"""Llama 3's 8B but for its vocabulary."""
SIXTEEN_BILLION_MOE = Shape("qwen3moe", 26, 2048, 1536, 32, 4, 128, num_experts=64, experts_per_token=8)
"""15.7 billion weights, of which a token meets 2.5."""


def write_random(shape: Shape, out: Path, tokenizer_of: Path, kind: Kind = "Q4_K_M", seed: int = 0) -> Path:
    """Write the file, with the tokenizer of the checkpoint `tokenizer_of`, unless it is there; return it."""
    if out.exists():
        return out
    partial = out.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), shape.family, use_temp_file=False)
    _add_shape(writer, shape, kind)
    add_tokenizer(writer, tokenizer_of, VOCAB_SIZE)
    rng = np.random.default_rng(seed)
    tensors = _tensors(shape, kind)
    for name, dimensions, type_of in tensors:
        if type_of is None:
            writer.add_tensor_info(name, dimensions, np.dtype(np.float32), 4 * int(np.prod(dimensions)))
        else:
            block, block_bytes = gguf.GGML_QUANT_SIZES[type_of]
            row = dimensions[-1] // block * block_bytes
            stored = (*dimensions[:-1], row)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=type_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _name, dimensions, type_of in tensors:
        if type_of is None:
            writer.write_tensor_data(_floats(rng, dimensions))
        else:
            writer.write_tensor_data(_blocks(rng, int(np.prod(dimensions)), type_of))
    writer.close()
    return partial.rename(out)


def _add_shape(writer: gguf.GGUFWriter, shape: Shape, kind: Kind) -> None:
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_vocab_size(VOCAB_SIZE)
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.experts_per_token)
        writer.add_expert_feed_forward_length(shape.intermediate)


def _tensors(shape: Shape, kind: Kind) -> list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType | None]]:
    """Return name, dimensions (rows first) and type of each tensor, in the file's order; None: float32."""
    hidden, inner = shape.hidden, shape.intermediate
    queries, values = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    usual, fine = (_Q4_K, _Q6_K) if kind == "Q4_K_M" else (_Q4_0, _Q4_0)
    found: list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType | None]] = [
        ("token_embd.weight", (VOCAB_SIZE, hidden), usual),
        ("output_norm.weight", (hidden,), None),
        ("output.weight", (VOCAB_SIZE, hidden), _Q6_K),
    ]
    experts = (shape.num_experts,) if shape.num_experts else ()
    suffix = "_exps" if experts else ""
    for layer in range(shape.num_layers):
        finer = fine if layer % 2 else usual
        prefix = f"blk.{layer}."
        found += [
            (prefix + "attn_norm.weight", (hidden,), None),
            (prefix + "ffn_norm.weight", (hidden,), None),
            (prefix + "attn_q.weight", (queries, hidden), usual),
            (prefix + "attn_k.weight", (values, hidden), usual),
            (prefix + "attn_v.weight", (values, hidden), finer),
            (prefix + "attn_output.weight", (hidden, queries), usual),
            (f"{prefix}ffn_gate{suffix}.weight", (*experts, inner, hidden), usual),
            (f"{prefix}ffn_up{suffix}.weight", (*experts, inner, hidden), usual),
            (f"{prefix}ffn_down{suffix}.weight", (*experts, hidden, inner), finer),
        ]
        if experts:
            found += [
                (prefix + "ffn_gate_inp.weight", (shape.num_experts, hidden), None),
                (prefix + "attn_q_norm.weight", (shape.head_dim,), None),
                (prefix + "attn_k_norm.weight", (shape.head_dim,), None),
            ]
    return found


def _floats(rng: np.random.Generator, dimensions: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return a norm's ones, or a router's random rows: equal ones would choose the same experts always."""
    if len(dimensions) == 1:
        return np.ones(dimensions, np.float32)
    return rng.normal(0, _DEVIATION, dimensions).astype(np.float32)


def _blocks(rng: np.random.Generator, num_weights: int, type_of: gguf.GGMLQuantizationType) -> Blocks:
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_of]
    blocks = rng.integers(0, 256, (num_weights // block, block_bytes), np.uint8)
    if type_of == _Q4_K:
        blocks[:, :2], blocks[:, 2:4] = _half(_Q4_K_SCALE), _half(7.5 * _Q4_K_SCALE)
    elif type_of == _Q4_0:
        blocks[:, :2] = _half(_Q4_0_SCALE)
    else:
        blocks[:, -2:] = _half(_Q6_K_SCALE)
    return blocks


def _half(value: float) -> Blocks:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)
