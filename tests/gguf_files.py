"""Tiny GGUF files of every family that is read, written as llama.cpp's converter writes them.

Beside each file stands a plain checkpoint with the numbers that the file's tensors stand for, as `gguf`
dequantizes them: what transformers computes with it is what must come out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, GemmaConfig, PreTrainedConfig

from stemma.model.files.tiny import save_checkpoint
from tests import checkpoints
from tests.gguf_layouts import LAYOUTS

Kind = GGMLQuantizationType
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
} | {family: layout.architecture for family, layout in LAYOUTS.items()}
"""Family -> llama.cpp's name of it."""

_GEMMAS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma": lambda: GemmaConfig(**checkpoints.base_fields(head_dim=16, tie_word_embeddings=True)),
    "gemma3": lambda: Gemma3TextConfig(
        **checkpoints.base_fields(
            head_dim=16,
            num_hidden_layers=7,
            sliding_window=checkpoints.SLIDING_WINDOW,
            query_pre_attn_scalar=16,
            tie_word_embeddings=True,
        )
    ),
}


@dataclass(frozen=True)
class TinyGGUF:
    """A file and the plain checkpoint that it must equal."""

    path: Path
    plain: Path
    header: dict[str, Any] = field(default_factory=dict)


def make_config(family: str, **overrides: Any) -> PreTrainedConfig:
    made = {family: layout.config for family, layout in LAYOUTS.items()}
    config = (checkpoints.CONFIGS | _GEMMAS | made)[family]()
    if family == "gemma2":
        config.tie_word_embeddings = True
    if family == "qwen3-moe":
        config.norm_topk_prob = True
    for name, value in overrides.items():
        setattr(config, name, value)
    return config


def build(
    family: str,
    folder: Path,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, npt.NDArray[Any]] | None = None,
    tensors_a_part: int = 0,
    **overrides: Any,
) -> TinyGGUF:
    """Write `model.gguf` and `plain/` into `folder`; `metadata` and `extra` tensors are added or replace
    others; None removes. With `tensors_a_part` the file is cut, and the path is that of the first part."""
    config = make_config(family, **overrides)
    plain = save_checkpoint(checkpoints.make_model(config, 0), checkpoints.tokenizer(), folder / "plain")
    weights = load_file(plain / "model.safetensors")
    rounded = {name: _rounded(name, tensor, kind) for name, tensor in weights.items()}
    save_file(rounded, plain / "model.safetensors", metadata={"format": "pt"})
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family], split_max_tensors=tensors_a_part)
    fields = _fields(family, config) | tokenizer_fields() | (metadata or {})
    for key, value in fields.items():
        if value is not None:
            _add(writer, key, value)
    for name, tensor in _stacked(weights).items():
        for made, data in _tensors(family, config, name, tensor.numpy()):
            type_ = _kind_of(name, data, kind)
            writer.add_tensor(made, _bytes(data, type_), raw_dtype=type_)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyGGUF(path if not tensors_a_part else min(folder.glob("model-*.gguf")), plain)


def _tensors(
    family: str, config: Any, name: str, data: npt.NDArray[Any]
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the file's tensors for one of transformers."""
    if family not in LAYOUTS:
        yield _gguf_name(family, config, name), _as_stored(family, config, name, data)
        return
    layer, within = "", name
    if name.startswith("model.layers."):
        _, _, number, within = name.split(".", 3)
        layer = f"blk.{number}."
    for made, stored in LAYOUTS[family].tensors(config, within, data):
        yield layer + made, stored


def _bytes(data: npt.NDArray[Any], kind: Kind) -> npt.NDArray[Any]:
    quantized: npt.NDArray[Any] = _quantize(np.ascontiguousarray(data), kind)
    return quantized


def _quantize(data: npt.NDArray[Any], kind: Kind) -> npt.NDArray[Any]:
    if kind in K_QUANTS:
        return _random_blocks(data, kind)
    quantized: npt.NDArray[Any] = gguf.quantize(data, kind)
    return quantized


K_QUANTS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS)
"""Types that `gguf` only reads: their blocks are random bytes with small scales."""
_SCALE_OFFSETS = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}


def _random_blocks(data: npt.NDArray[Any], kind: Kind) -> npt.NDArray[np.uint8]:
    """Random blocks of the shape of `data`; the same values give the same blocks."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(abs(data).sum() * 1e3))
    blocks = rng.integers(0, 256, (data.size // block, block_bytes), dtype=np.uint8)
    for offset in _SCALE_OFFSETS[kind]:
        scale = rng.uniform(1e-4, 3e-4, (len(blocks), 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8)
    return blocks.reshape(*data.shape[:-1], -1)


def random_rows(kind: Kind, num_rows: int, num_blocks: int) -> npt.NDArray[np.uint8]:
    """Rows of random blocks of any type, with finite scales."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (num_rows, num_blocks, block_bytes), dtype=np.uint8)
    for offset in _SCALE_OFFSETS.get(kind, (0, 2) if kind in (Kind.Q4_1, Kind.Q5_1) else (0,)):
        values = rng.normal(0.0, 1.0, (num_rows, num_blocks, 1)).astype(np.float16)
        rows[..., offset : offset + 2] = values.view(np.uint8)
    if kind == Kind.MXFP4:
        rows[..., 0] = rng.integers(100, 150, rows.shape[:2])  # an exponent
    return rows.reshape(num_rows, -1)


def _kind_of(name: str, data: npt.NDArray[Any], kind: Kind | Callable[[str], Kind]) -> Kind:
    """Vectors and routers stay float32, as llama.cpp leaves them; a function chooses by transformers'
    name."""
    if data.ndim == 1 or any(part in name for part in _PLAIN):
        return Kind.F32
    return kind if isinstance(kind, Kind) else kind(name)


_PLAIN = (
    *(".mlp.gate.", ".block_sparse_moe.gate.", ".router.", "_bias", ".A_log", ".D", ".mamba.norm."),
    *(".conv1d.", ".conv.conv.", "shared_expert_gate", ".in_proj_a.", ".in_proj_b.", ".in_proj_ba."),
)
"""What llama.cpp leaves in float32, in names of transformers."""


def _rounded(name: str, tensor: torch.Tensor, kind: Kind | Callable[[str], Kind]) -> torch.Tensor:
    data = tensor.numpy()
    type_ = _kind_of(name, data, kind)
    # GPT-OSS has experts as [inputs, outputs], the file's rows are outputs.
    is_turned = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    data = data.swapaxes(1, 2) if is_turned else data
    rounded = gguf.dequantize(_bytes(data, type_), type_)
    return torch.from_numpy(np.ascontiguousarray(rounded.swapaxes(1, 2) if is_turned else rounded))


def _stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack experts, as GGUF does."""
    stacked: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(
        weights, key=lambda each: [int(part) if part.isdigit() else 0 for part in each.split(".")]
    ):
        if re.search(r"\.experts\.[0-9]", name):
            head, rest = name.split(".experts.")
            experts.setdefault(f"{head}.experts.{rest.partition('.')[2]}", []).append(weights[name])
        else:
            stacked[name] = weights[name]
    return stacked | {name: torch.stack(parts) for name, parts in experts.items()}


def _as_stored(family: str, config: Any, name: str, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Do what llama.cpp's converter does to a tensor of the family."""
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return data + np.float32(1.0)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if family == "llama" and part in heads:
        half = data.shape[0] // heads[part] // 2
        return data.reshape(heads[part], 2, half, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    return data


def _gguf_name(family: str, config: Any, name: str) -> str:
    [architecture] = [key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == ARCHITECTURES[family]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stem, _, suffix = name.rpartition(".")
    found = names.get_name(stem)
    assert found is not None, name
    return f"{found}.{suffix}"


def _fields(family: str, config: Any) -> dict[str, Any]:
    rope, layout = config.rope_parameters, LAYOUTS.get(family)
    theta = rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"]
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", 0.0),
        "rope.freq_base": float(theta),
    }
    if layout is not None:
        fields |= layout.fields(config)
    elif family not in ("llama", "qwen2"):
        fields |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if family in ("gemma2", "gemma3"):
        fields["attention.sliding_window"] = config.sliding_window
    if family == "gemma2":
        fields["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        fields["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if family == "qwen3-moe":
        fields["expert_count"] = config.num_experts
        fields["expert_used_count"] = config.num_experts_per_tok
        fields["expert_feed_forward_length"] = config.moe_intermediate_size
    return {f"{ARCHITECTURES[family]}.{key}": value for key, value in fields.items()}


def tokenizer_fields() -> dict[str, Any]:
    tokenizer = checkpoints.tokenizer()
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab: dict[str, int] = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    special = {token["content"] for token in stored["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]
        ],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
