"""Llama's config has the fields and defaults of transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError
from stemma.model.files.llama_config import LlamaConfig, as_transformers, read_llama_config
from stemma.model.opened.checkpoint_config import load_config

SCALED = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 256,
}
RAW: list[dict[str, Any]] = [
    {},
    {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "tie_word_embeddings": True},
    {"rope_theta": 5e5, "rope_scaling": SCALED, "torch_dtype": "bfloat16", "eos_token_id": [1, 2]},
    {
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "other": 7,
    },
]


def write(path: Path, **raw: Any) -> Path:
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **raw})
    )
    return path


@pytest.mark.parametrize("raw", RAW)
def test_same_fields_as_transformers(raw: dict[str, Any], tmp_path: Path) -> None:
    own = read_llama_config(write(tmp_path, **raw))
    assert own is not None
    original = transformers.LlamaConfig.from_pretrained(str(tmp_path))
    assert own.to_dict() == {**original.to_dict(), "sliding_window": None}
    assert as_transformers(own).to_dict() == original.to_dict()
    assert type(as_transformers(own)) is transformers.LlamaConfig
    assert as_transformers(own)._name_or_path == original._name_or_path


def test_defaults_are_those_of_transformers() -> None:
    assert LlamaConfig().to_dict() == {**transformers.LlamaConfig().to_dict(), "sliding_window": None}


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "mistral"},
        {"sliding_window": 24},
        {"auto_map": {"AutoConfig": "own.Own"}},
        {"hidden_size": 65, "num_attention_heads": 4},
        {"num_attention_heads": 0},
        {"hidden_size": "64"},
    ],
)
def test_others_are_left_to_transformers(raw: dict[str, Any], tmp_path: Path) -> None:
    assert read_llama_config(write(tmp_path, **raw)) is None


def test_a_field_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't read .*config\.json.*intermediate_size"):
        load_config(ModelSettings(path=write(tmp_path, intermediate_size="wide")))
