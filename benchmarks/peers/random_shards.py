"""Writes random checkpoints as Hugging Face lays them out, a file a layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def write_shards(
    out: Path,
    tokenizer_of: Path,
    config: Mapping[str, object],
    layers: Callable[[int], Tensors],
    ends: Callable[[], Tensors],
) -> Path:
    """Write `config`, the layers that it counts, and what is of none, unless it's there; return `out`."""
    if (out / "complete").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    for file in (*tokenizer_of.glob("tokenizer*"), *tokenizer_of.glob("*.jinja")):
        shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    names: dict[str, str] = {}
    count = config["num_hidden_layers"]
    assert isinstance(count, int)
    for layer in range(count):
        _save(out, f"model-{layer:02d}.safetensors", layers(layer), names)
    _save(out, "model-ends.safetensors", ends(), names)
    index = {"metadata": {}, "weight_map": names}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "complete").touch()
    return out


def _save(out: Path, file: str, tensors: Tensors, names: dict[str, str]) -> None:
    save_file(tensors, out / file, metadata={"format": "pt"})
    names.update(dict.fromkeys(tensors, file))
