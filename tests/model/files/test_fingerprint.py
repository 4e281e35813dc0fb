"""The fingerprint changes with the weights and with nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import checkpoints

from stemma.errors import ModelError
from stemma.model.files import fingerprint
from stemma.model.files.fingerprint import model_fingerprint


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


def test_large_tensors_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sampling, noise added to any one of the tensors is still seen."""
    monkeypatch.setattr(fingerprint, "SAMPLE_STRIDE", 1 << 12)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 1 << 6)
    (tmp_path / "config.json").write_text("{}")
    weights = {name: torch.randn(64, 64) for name in "abcd"}
    seen = set()
    for changed in ("", *weights):
        noisy = {n: t + 0.01 * torch.randn_like(t) if n == changed else t for n, t in weights.items()}
        save_file(noisy, tmp_path / "model.safetensors")
        seen.add(model_fingerprint(tmp_path, whole_bytes=0))
    assert len(seen) == 5


@pytest.mark.parametrize("name", ["k_proj.bias", "v_proj.bias", "input_layernorm.weight"])
def test_small_tensors_of_large_checkpoints_count_whole(tmp_path: Path, name: str) -> None:
    """Shapes of Qwen2.5: the last value of one bias differs; all biases lie between samples."""
    path = checkpoints.build("qwen2", tmp_path / "a")
    weights = load_file(path / "model.safetensors")
    largest = max(tensor.nbytes for tensor in weights.values())
    bound = sum(tensor.nbytes for tensor in weights.values() if tensor.nbytes < largest)
    before = model_fingerprint(path, whole_bytes=bound)
    weights[next(key for key in weights if key.endswith(name))][-1] += 0.125
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert model_fingerprint(path, whole_bytes=bound) != before


def test_how_much_is_hashed_is_bounded(tmp_path: Path) -> None:
    """A value between the samples of a large tensor isn't seen: the price of a quick start."""
    (tmp_path / "config.json").write_text("{}")
    weights = {"large": torch.zeros(1 << 20), "small": torch.zeros(8)}
    found = []
    for place in (None, (1 << 18) - 5, 0, 1 << 19, -1):
        changed = {name: tensor.clone() for name, tensor in weights.items()}
        if place is not None:
            changed["large"][place] = 1.0
        save_file(changed, tmp_path / "model.safetensors")
        found.append(model_fingerprint(tmp_path, whole_bytes=1 << 20))
    assert found[1] == found[0]
    assert len(set(found[1:])) == 4  # head, middle and tail are always seen


def test_shards_dont_count_but_their_content_does(checkpoint: Path, tmp_path: Path) -> None:
    """The same tensors in two files are the same model; one left out of the index is another, or an error."""
    copy = tmp_path / "shards"
    shutil.copytree(checkpoint, copy)
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: weights[n] for n in names if weight_map[n] == file}, copy / file)
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert model_fingerprint(copy) == model_fingerprint(checkpoint)
    index.write_text(json.dumps({"weight_map": {**weight_map, "more": "part-2.safetensors"}}))
    with pytest.raises(ModelError, match="lacks 1 of 3 weight files"):
        model_fingerprint(copy)
    index.write_text(json.dumps({"weight_map": {name: "../part-0.safetensors" for name in names}}))
    with pytest.raises(ModelError, match="weight_map"):
        model_fingerprint(copy)


def test_remote_code_counts_where_it_runs(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "modeling_own.py").write_text("SCALE = 1\n")
    first = model_fingerprint(copy, remote_code=True)
    (copy / "modeling_own.py").write_text("SCALE = 2\n")
    assert model_fingerprint(copy, remote_code=True) != first
    assert model_fingerprint(copy) == model_fingerprint(checkpoint)


def test_tokenizer_doesnt_count(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "tokenizer.json").unlink()
    assert model_fingerprint(copy) == model_fingerprint(checkpoint)


def test_unreadable_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        model_fingerprint(tmp_path)
