"""Weights packed before they are asked for: the same bits, or else the load does all by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import checkpoints
from tests.model.paging import PagedSequences

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError
from stemma.model.files.fingerprint import EarlyFingerprint, model_fingerprint
from stemma.model.load import fused_loading
from stemma.model.load.early_packing import EarlyPacking, is_finite
from stemma.model.load.loading import load_model
from stemma.model.load.plan import LoadPlan
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.opened.checkpoint import DecoderParts
from stemma.model.weights.named import NamedWeights
from stemma.native.library import load_kernels
from stemma.supervision import LoggingSupervisor

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="without kernels nothing is packed")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral-sliding", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "seed-oss": ("seed-oss", {}),
    "smollm3": ("smollm3", {}),
}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the checkpoints whose weights the load packed by itself: it had no packed ones."""
    found: list[object] = []
    read = fused_loading.named_weights

    def seen(checkpoint: DecoderParts) -> NamedWeights:
        found.append(checkpoint)
        return read(checkpoint)

    monkeypatch.setattr(fused_loading, "named_weights", seen)
    return found


def load(path: Path, **settings: Any) -> CausalLM:
    return load_model(ModelSettings(path=path, device="cpu", **settings))


def load_early(path: Path, **settings: Any) -> CausalLM:
    """Load by what a plan began for the same checkpoint without these settings."""
    plan = LoadPlan(ModelSettings(path=path, device="cpu"), LoggingSupervisor(), is_whole=True)
    try:
        return load_model(ModelSettings(path=path, device="cpu", **settings), plan=plan)
    finally:
        plan.close()


def assert_same(one: CausalLM, other: CausalLM) -> None:
    assert one.info == other.info
    assert one.layout(16) == other.layout(16)
    assert one.adaptable == other.adaptable
    assert torch.equal(logits(one), logits(other))


def logits(model: CausalLM) -> torch.Tensor:
    run = PagedSequences(model, [list(range(3, 90)), [5, 9, 300]])
    run.step([(0, 50), (1, 1)])
    run.finish(chunk=20)
    return torch.cat(list(run.logits))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str, dtype: torch.dtype, checked: list[object], tmp_path: Path) -> None:
    family, fields = CASES[case]
    path = checkpoints.build(family, tmp_path, dtype=dtype, **fields)
    early = load_early(path)
    assert not checked
    assert_same(early, load(path))
    assert len(checked) == 1


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantize": "int8"}, {"isa": "portable"}])
def test_asked_for_otherwise(settings: dict[str, Any], checked: list[object], tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path)
    assert_same(load_early(path, **settings), load(path, **settings))
    assert len(checked) == 2


@pytest.mark.parametrize("family", ["gemma2", "qwen3-moe", "mistral-sliding"])
def test_other_families(family: str, checked: list[object], tmp_path: Path) -> None:
    path = checkpoints.build(family, tmp_path)
    assert_same(load_early(path), load(path))


def test_a_file_that_changed_meanwhile(checked: list[object], tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path / "a")
    other = checkpoints.build("llama", tmp_path / "b", seed=1)
    plan = LoadPlan(ModelSettings(path=path, device="cpu"), LoggingSupervisor(), is_whole=True)
    assert plan.packing is not None
    plan.packing.wait()
    os.replace(other / "model.safetensors", path / "model.safetensors")
    assert_same(load_model(ModelSettings(path=path, device="cpu"), plan=plan), load(path))
    plan.close()
    assert len(checked) == 2


def test_a_config_that_says_otherwise(tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path)
    config = (path / "config.json").read_text()
    assert '"num_hidden_layers": 2' in config
    (path / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ModelError, match="lacks 9 weights of LlamaForCausalLM"):
        load_early(path)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_numbers(name: str, value: float, tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path)
    weights = load_file(path / "model.safetensors")
    weights[name].view(-1)[-1] = value
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"weight {name} has 1 values that are NaN or infinite"):
        load_early(path)


def test_files_that_are_damaged(tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 weights"):
        load_early(path)
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ModelError, match="ends before its tensor"):
        load_early(path)


def test_nobody_wants_them(tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path)
    early = EarlyPacking(path, "auto", lambda: None, LoggingSupervisor())
    early.close()
    assert early.take([], torch.float32, is_tied=False, isa="auto") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_finite(dtype: torch.dtype) -> None:
    weight = torch.full((3, 100_000), -torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(weight)
    for value in (float("nan"), -float("nan"), float("inf"), float("-inf")):
        for at in (0, 131_071, 131_072, -1):
            spoiled = weight.clone()
            spoiled.view(-1)[at] = value
            assert not is_finite(spoiled)


def early_fingerprint(path: Path) -> EarlyFingerprint:
    return EarlyFingerprint(path, lambda: None, LoggingSupervisor())


def test_fingerprint_of_other_files(tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path / "a")
    right = model_fingerprint(path)
    assert early_fingerprint(path).take(path) == right
    assert early_fingerprint(path).take(tmp_path / "b") is None
    assert early_fingerprint(tmp_path / "none").take(tmp_path / "none") is None
    early = early_fingerprint(path)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    assert early.take(path) != right
