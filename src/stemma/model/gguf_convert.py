"""Converts a Llama model in one GGUF file into a Hugging Face checkpoint directory.

The `gguf` package reads and dequantizes. This module renames tensors, undoes llama.cpp's row order of query
and key weights, and builds config and tokenizer from the file's metadata.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from stemma.errors import ModelError

_SPECIAL = 3
"""Token type of control tokens (``llama_token_type`` in llama.cpp)."""
_END_OF_TEXT = "<|endoftext|>"
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class GGUFFile:
    """A GGUF file's metadata and tensors.

    Raises ModelError if the file can't be read or is no Llama model, or if `gguf` isn't installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ModelError("reading GGUF needs the gguf package: pip install 'stemma[demo]'") from error
        self._path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelError(f"can't read {path} as GGUF: {error}") from error
        architecture = self.metadata("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{path} holds architecture {architecture!r}; only llama can be converted")

    def metadata(self, key: str) -> Any:
        """Return the value of a metadata key. Raises ModelError if the file doesn't have it."""
        field = self._reader.get_field(key)
        if field is None:
            raise ModelError(f"{self._path} has no metadata {key}")
        return field.contents()

    def config(self) -> LlamaConfig:
        """Return the model's config."""
        names = {tensor.name for tensor in self._reader.tensors}
        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
            vocab_size=len(self.metadata("tokenizer.ggml.tokens")),
            hidden_size=self.metadata("llama.embedding_length"),
            intermediate_size=self.metadata("llama.feed_forward_length"),
            num_hidden_layers=self.metadata("llama.block_count"),
            num_attention_heads=self.metadata("llama.attention.head_count"),
            num_key_value_heads=self.metadata("llama.attention.head_count_kv"),
            max_position_embeddings=self.metadata("llama.context_length"),
            rms_norm_eps=self.metadata("llama.attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": self.metadata("llama.rope.freq_base")},
            tie_word_embeddings="output.weight" not in names,
            bos_token_id=self.metadata("tokenizer.ggml.bos_token_id"),
            eos_token_id=self.metadata("tokenizer.ggml.eos_token_id"),
        )

    def weights(self, config: LlamaConfig) -> dict[str, torch.Tensor]:
        """Return the dequantized weights as bfloat16, under transformers' names."""
        from gguf import dequantize

        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        weights: dict[str, torch.Tensor] = {}
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            layer = _LAYER_NAME.fullmatch(tensor.name)
            if layer and layer[2] in _LAYER_TENSORS:
                if num_heads := heads.get(layer[2]):
                    values = _half_rotated(values, num_heads)
                name = f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.weight"
            elif tensor.name in _TOP_TENSORS:
                name = _TOP_TENSORS[tensor.name]
            else:
                raise ModelError(f"{self._path} has a tensor that no plain Llama model has: {tensor.name}")
            weights[name] = torch.tensor(values, dtype=torch.bfloat16)
        return weights

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the byte-level BPE tokenizer, its special tokens and its chat template."""
        model, split = self.metadata("tokenizer.ggml.model"), self.metadata("tokenizer.ggml.pre")
        if (model, split) != ("gpt2", "smollm"):
            raise ModelError(f"{self._path} has a tokenizer that can't be converted: {model}, {split}")
        tokens: list[str] = self.metadata("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.metadata("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(
            models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self.metadata("tokenizer.ggml.token_type")
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
        fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer,
            bos_token=tokens[self.metadata("tokenizer.ggml.bos_token_id")],
            eos_token=tokens[self.metadata("tokenizer.ggml.eos_token_id")],
            unk_token=tokens[self.metadata("tokenizer.ggml.unknown_token_id")],
            pad_token=tokens[self.metadata("tokenizer.ggml.padding_token_id")],
            clean_up_tokenization_spaces=False,
        )
        fast.chat_template = self.metadata("tokenizer.chat_template")
        return fast


def convert(source: Path, target: Path) -> None:
    """Write the model in the GGUF file `source` as a bfloat16 checkpoint into the empty directory `target`.

    Raises ModelError if the file isn't a Llama model as it is understood here, OSError if writing fails.
    """
    file = GGUFFile(source)
    config, tokenizer = file.config(), file.tokenizer()
    save_file(file.weights(config), target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # A completion without a chat template ends with the end of a document, not with the end of a turn.
    ends = {tokenizer.eos_token_id, tokenizer.get_vocab().get(_END_OF_TEXT, tokenizer.eos_token_id)}
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}) + "\n")


def _half_rotated(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorder the rows of a query or key weight [num_heads * dim, in].

    llama.cpp stores rows that rotate together next to each other; transformers half a head apart.
    """
    pairs = weight.shape[0] // num_heads // 2
    by_pair = weight.reshape(num_heads, pairs, 2, *weight.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(weight.shape)
