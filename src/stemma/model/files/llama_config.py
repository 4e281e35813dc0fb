"""Llama's config, without the modeling code that transformers imports to check one field of it.

That import takes a second, more than a small model's whole load. The fields are transformers': those that are
Mistral's too come from there, and tests compare all of them with transformers' own class.
"""

# No `annotations` from __future__: `strict` checks values against the annotations themselves, not their text.

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.mistral.configuration_mistral import MistralConfig

from stemma.model.files.directory import CONFIG, has_file, is_gguf, read_json


@strict
class LlamaConfig(MistralConfig):  # type: ignore[no-untyped-call]
    """For models that are read without transformers' modules; its name is what transformers looks up."""

    model_type = "llama"

    intermediate_size: int = 11008
    num_key_value_heads: int | None = None  # type: ignore[assignment]
    max_position_embeddings: int = 2048
    pretraining_tp: int | None = 1
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0  # type: ignore[assignment]
    mlp_bias: bool = False
    sliding_window: int | None = None


def read_llama_config(path: Path) -> LlamaConfig | None:
    """Return the config of a checkpoint's directory if it is a plain Llama's; None for all others.

    Raises ModelError if there is no config.json; what transformers raises if a field is of a wrong type.
    """
    if is_gguf(path) or not has_file(path, CONFIG) or not _has_own_fields(read_json(path / CONFIG)):
        return None
    config: LlamaConfig = LlamaConfig.from_pretrained(str(path), local_files_only=True)
    return config


def _has_own_fields(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json holds what `LlamaConfig` checks; transformers says what is wrong with others."""
    heads = raw.get("num_attention_heads", LlamaConfig.num_attention_heads)
    hidden = raw.get("hidden_size", LlamaConfig.hidden_size)
    if type(heads) is not int or type(hidden) is not int or heads <= 0 or hidden % heads:
        return False
    return raw.get("model_type") == "llama" and raw.get("sliding_window") is None and "auto_map" not in raw


def as_transformers(config: Any) -> Any:
    """Return transformers' own config where `config` is ours, else `config`."""
    if not isinstance(config, LlamaConfig):
        return config
    from transformers import LlamaConfig as Original

    fields = config.to_dict()
    del fields["sliding_window"]
    original = Original.from_dict(fields)
    original._name_or_path = config._name_or_path
    return original
