"""The fingerprint changes with the weights and with nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stemma.errors import ModelError
from stemma.model import fingerprint
from stemma.model.fingerprint import model_fingerprint
from tests import checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.build("llama", tmp_path_factory.mktemp("fingerprint") / "a")


def test_equal_files_equal_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {"transformers_version": "0", "_name_or_path": "elsewhere"}
    (copy / "config.json").write_text(json.dumps(config, indent=7))
    (copy / "generation_config.json").unlink()
    assert model_fingerprint(copy) == model_fingerprint(checkpoint)


def test_one_changed_weight_changes_it(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] += 1.0
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert model_fingerprint(copy) != model_fingerprint(checkpoint)


def test_config_that_matters_changes_it(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (copy / "config.json").write_text(json.dumps(config))
    assert model_fingerprint(copy) != model_fingerprint(checkpoint)


def test_large_files_are_sampled_in_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sampling, noise added to any one of the tensors is still seen."""
    monkeypatch.setattr(fingerprint, "FULL_HASH_BYTES", 0)
    monkeypatch.setattr(fingerprint, "SAMPLE_STRIDE", 1 << 12)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 1 << 6)
    (tmp_path / "config.json").write_text("{}")
    weights = {name: torch.randn(64, 64) for name in "abcd"}
    seen = set()
    for changed in ("", *weights):
        noisy = {n: t + 0.01 * torch.randn_like(t) if n == changed else t for n, t in weights.items()}
        save_file(noisy, tmp_path / "model.safetensors")
        seen.add(model_fingerprint(tmp_path))
    assert len(seen) == 5


def test_unreadable_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        model_fingerprint(tmp_path)
