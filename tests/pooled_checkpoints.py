"""Tiny checkpoints of embedding models and rerankers, with the files of sentence-transformers beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from stemma.model.files.tiny import END_OF_TEXT, build_tokenizer, randomize, save_checkpoint
from tests.checkpoints import base_fields

PROMPTS = {"query": "Instruct: find the passage that answers\nQuery:", "document": ""}
POOLINGS = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}


def config(**overrides: Any) -> Qwen3Config:
    return Qwen3Config(**base_fields(head_dim=16, tie_word_embeddings=True) | overrides)


def tokenizer(*, ends_texts: bool = False) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with tokens for yes and no; as Qwen3-Embedding's, it may end texts by a token."""
    made = build_tokenizer()
    made.add_tokens(["yes", "no"])
    if ends_texts:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {END_OF_TEXT}",
            pair=f"$A {END_OF_TEXT} $B {END_OF_TEXT}",
            special_tokens=[(END_OF_TEXT, made.convert_tokens_to_ids(END_OF_TEXT))],
        )
    return made


def build_embedding(
    path: Path,
    pooling: str = "last",
    *,
    headless: bool = True,
    normalizes: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a model of Qwen3-Embedding's kind: its file holds no head, and no ``model.`` in its names."""
    words = tokenizer(ends_texts=True)
    made = config(vocab_size=len(words), **overrides)
    model: Any = Qwen3Model(made) if headless else Qwen3ForCausalLM(made)
    randomize(model, seed)
    save_checkpoint(model.to(dtype), words, path)
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    write_modules(path, modules)
    switches = {f"pooling_mode_{name}": kind == pooling for kind, name in POOLINGS.items()}
    write(path / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **switches})
    write(path / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
    return path


def build_reranker(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a causal model with an output head."""
    words = tokenizer()
    model = Qwen3ForCausalLM(config(vocab_size=len(words), **overrides))
    randomize(model, seed)
    return save_checkpoint(model, words, path)


def build_classifier(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a reranker that was converted to a sequence classifier with one label."""
    words = tokenizer()
    fields = {"num_labels": 1, **overrides}
    model = Qwen3ForSequenceClassification(config(vocab_size=len(words), **fields))
    randomize(model, seed)
    return save_checkpoint(model, words, path)


def write_modules(path: Path, names: list[str]) -> None:
    folders = ["", *(f"{number}_{name}" for number, name in enumerate(names[1:], 1))]
    listed = [
        {"idx": number, "name": str(number), "path": folder, "type": f"sentence_transformers.models.{name}"}
        for number, (name, folder) in enumerate(zip(names, folders, strict=True))
    ]
    write(path / "modules.json", listed)


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
