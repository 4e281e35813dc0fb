"""Writes the model of a GGUF file as a Hugging Face checkpoint directory, dequantized."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from stemma.model.families.registry import stacked_experts
from stemma.model.files.gguf_header import read_header
from stemma.model.files.llama_config import as_transformers
from stemma.model.formats.gguf.config import read_config
from stemma.model.formats.gguf.tokenizer import read_tokenizer
from stemma.model.formats.gguf.vocabulary import end_token_ids
from stemma.model.formats.gguf.weights import read_weights


def convert(source: Path, target: Path) -> None:
    """Write the model in the GGUF file `source` as a bfloat16 checkpoint into the empty directory `target`.

    Raises ModelError if the file isn't read, OSError if writing fails.
    """
    header = read_header(source)
    config, tokenizer = read_config(header), read_tokenizer(header)
    config.dtype = torch.bfloat16
    weights, _ = read_weights(header, config, torch.bfloat16, keep=False)
    tensors = stacked_experts(config, weights.dequantized(torch.bfloat16))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    as_transformers(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    # A completion without a chat template ends with the end of a document, not with the end of a turn.
    ends = list(end_token_ids(header))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n")
