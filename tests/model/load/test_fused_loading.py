"""Models read without transformers' modules are those that go through them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import checkpoints
from tests.model.paging import PagedSequences

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError
from stemma.model.families.layout import ModelLayout
from stemma.model.load import fused_loading, loading
from stemma.model.load.job import Loaded, LoadJob
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.native.library import load_kernels

ROPE = {"rope_theta": 5e5}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 256, **ROPE},
}
LONGROPE = {
    **{"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 256},
    **{"short_factor": [1.0 + n / 8 for n in range(8)], "long_factor": [2.0 + n for n in range(8)], **ROPE},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **ROPE}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral-sliding", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "seed-oss": ("seed-oss", {}),
    "seed-oss-biased": ("seed-oss", {"attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {}),
    "smollm3-biased": ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    "mistral-sliding": ("mistral-sliding", {}),
    "qwen2-sliding": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "qwen3-dynamic": ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **ROPE}}),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE}),
    "qwen3-moe": ("qwen3-moe", {}),
    "deepseek-v2": ("deepseek-v2", {}),
    "deepseek-v3": ("deepseek-v3", {}),
    "qwen3-linear": ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **ROPE}}),
}

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="without kernels transformers' modules run")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[ModelLayout]:
    """Return the layouts of models that were read without modules."""
    found: list[ModelLayout] = []

    def seen(load: LoadJob, layout: ModelLayout) -> Loaded:
        found.append(layout)
        return fused_loading.load_fused(load, layout)

    monkeypatch.setattr(loading, "load_fused", seen)
    return found


def load(path: Path, **settings: Any) -> CausalLM:
    return load_model(ModelSettings(path=path, device="cpu", **settings))


def load_both(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[CausalLM, CausalLM]:
    """Return the model as it is read, and as it goes through transformers."""
    own = load(path, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "fitting_layout", lambda _checkpoint: None)
        return own, load(path, **settings)


def logits(model: CausalLM) -> torch.Tensor:
    run = PagedSequences(model, [list(range(3, 90)), [5, 9, 300]])
    run.step([(0, 50), (1, 1)])
    run.finish(chunk=20)
    return torch.cat(list(run.logits))


def assert_same(own: CausalLM, other: CausalLM) -> None:
    # Joined products take other room.
    assert replace(own.info, weight_bytes=0, numeric_path="") == replace(
        other.info, weight_bytes=0, numeric_path=""
    )
    assert own.layout(16) == other.layout(16)
    assert own.adaptable == other.adaptable
    assert_close(own, other)


def assert_close(own: CausalLM, other: CausalLM) -> None:
    """Modules add up some sums in another order, which may route a token to another expert."""
    one, two = logits(own), logits(other)
    errors = (one - two).norm(dim=-1) / two.norm(dim=-1)
    assert errors.median() <= (1e-5 if own.dtype == torch.float32 else 0.03)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_as_through_transformers(
    case: str, dtype: str, read: list[ModelLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, fields = CASES[case]
    path = checkpoints.build(family, tmp_path, **fields)
    own, other = load_both(path, monkeypatch, dtype=dtype)
    assert len(read) == 1
    assert_same(own, other)


def test_rounded_weights_are_the_same(
    read: list[ModelLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.build("qwen3", tmp_path)
    own, other = load_both(path, monkeypatch, quantize="int8", dtype="bfloat16")
    assert len(read) == 1
    assert_same(own, other)


def test_tensors_of_mixed_dtypes(
    read: list[ModelLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.build("llama", tmp_path, dtype=torch.bfloat16)
    tensors = load_file(path / "model.safetensors")
    for name, dtype in {"model.norm.weight": torch.float32, "lm_head.weight": torch.float16}.items():
        tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    own, other = load_both(path, monkeypatch)
    assert len(read) == 1
    assert own.dtype == torch.bfloat16
    assert_same(own, other)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {}),
    ],
)
def test_others_go_through_transformers(
    family: str, fields: dict[str, Any], read: list[ModelLayout], tmp_path: Path
) -> None:
    load(checkpoints.build(family, tmp_path, **fields))
    assert not read


def edit(path: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to a checkpoint; in names, two underscores stand for a dot."""
    stored = load_file(path / "model.safetensors")
    stored |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})


def test_frequencies_of_old_checkpoints_are_left(
    read: list[ModelLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.build("llama", tmp_path)
    edit(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    own, other = load_both(path, monkeypatch)
    assert len(read) == 1
    assert_close(own, other)


def test_a_head_equal_to_the_embedding_that_it_is_tied_to_is_left(
    read: list[ModelLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.build("qwen2", tmp_path, tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit(path, lm_head__weight=embedding.clone())
    own, other = load_both(path, monkeypatch)
    assert len(read) == 1
    assert_close(own, other)


def test_another_head_than_the_embedding_goes_through_transformers(
    read: list[ModelLayout], tmp_path: Path
) -> None:
    path = checkpoints.build("qwen2", tmp_path, tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit(path, lm_head__weight=embedding + 1)
    load(path)
    assert not read


def test_a_tensor_without_a_place_is_refused(read: list[ModelLayout], tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path)
    edit(path, model__layers__0__more__weight=torch.ones(8))
    with pytest.raises(ModelError, match="no place"):
        load(path)
    assert not read


def test_without_kernels_modules_run(
    read: list[ModelLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEMMA_NATIVE", "0")
    load(checkpoints.build("llama", tmp_path))
    assert not read


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_head_with_fewer_angles_than_dims_is_refused(family: str, tmp_path: Path) -> None:
    """The native step reads an angle for every dim: those beyond the end would be somebody else's memory."""
    path = checkpoints.build(family, tmp_path)
    config = json.loads((path / "config.json").read_text())
    rope = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5, **ROPE}
    (path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    with pytest.raises(ModelError, match="can't run"):
        load_model(ModelSettings(path=path))
