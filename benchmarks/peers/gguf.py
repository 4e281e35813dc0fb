"""Writes a Qwen2-family checkpoint as GGUF, so that llama.cpp serves the very same weights.

Run with a Python that has `gguf`: ``python -m benchmarks.peers.gguf CHECKPOINT OUT.gguf [TYPE]``.
TYPE is BF16 (the default), Q8_0 or Q4_0. With Q4_0 the output head is Q8_0, as llama.cpp's own quantizer
keeps it at more bits than the layers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a Hugging Face Qwen2 tensor; raise KeyError for an unknown one."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}"


_FILE_TYPES = {
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}


def convert(checkpoint: Path, out: Path, kind: str = "BF16") -> None:
    """Write `checkpoint` (Qwen2, one safetensors file, byte-level BPE) to `out`, matrices as `kind`."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(_FILE_TYPES[kind])
    add_tokenizer(writer, checkpoint, config["vocab_size"])
    import torch

    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            tensor = file.get_tensor(name)
            if tensor.ndim == 1:  # norms and biases are kept in fp32 by llama.cpp
                writer.add_tensor(gguf_name(name), tensor.float().numpy())
            elif kind == "BF16":
                raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
                writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
            else:
                type_of = gguf.GGMLQuantizationType["Q8_0" if name == "lm_head.weight" else kind]
                codes = gguf.quants.quantize(tensor.float().numpy(), type_of)
                writer.add_tensor(gguf_name(name), codes, raw_dtype=type_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, checkpoint: Path, vocab_size: int) -> None:
    data = json.loads((checkpoint / "tokenizer.json").read_text())
    tokens = [f"<unused{i}>" for i in range(vocab_size)]
    kinds = np.full(vocab_size, gguf.TokenType.UNUSED, dtype=np.int32)
    for token, index in data["model"]["vocab"].items():
        tokens[index] = token
        kinds[index] = gguf.TokenType.NORMAL
    for added in data["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds.tolist())
    writer.add_token_merges(merges)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    template = checkpoint / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
