"""Models read without transformers' modules equal those that go through them, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError
from stemma.model import pretrained
from stemma.model.causal_lm import CausalLM
from stemma.model.dense import DenseModel
from stemma.model.loading import load_model
from stemma.native.library import load_kernels
from tests import checkpoints
from tests.model.paging import PagedSequences

ROPE = {"rope_theta": 5e5}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 256, **ROPE},
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
    "qwen3-linear": ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **ROPE}}),
}

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="without kernels transformers' modules run")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[DenseModel]:
    """Return the models that were read without modules."""
    found: list[DenseModel] = []

    class Seen(DenseModel):
        def __init__(self, *of_checkpoint: Any) -> None:
            super().__init__(*of_checkpoint)
            found.append(self)

    monkeypatch.setattr(pretrained, "DenseModel", Seen)
    return found


def load(path: Path, **settings: Any) -> CausalLM:
    return load_model(ModelSettings(path=path, device="cpu", **settings))


def load_both(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[CausalLM, CausalLM]:
    """Return the model as it is read, and as it goes through transformers."""
    own = load(path, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "fitting_layout", lambda *_of_checkpoint: None)
        return own, load(path, **settings)


def logits(model: CausalLM) -> torch.Tensor:
    run = PagedSequences(model, [list(range(3, 90)), [5, 9, 300]])
    run.step([(0, 50), (1, 1)])
    run.finish(chunk=20)
    return torch.cat(list(run.logits))


def assert_same(own: CausalLM, other: CausalLM) -> None:
    assert own.info == other.info
    assert own.layout(16) == other.layout(16)
    assert own.adaptable == other.adaptable
    assert torch.equal(logits(own), logits(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_through_transformers(
    case: str, dtype: str, read: list[DenseModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, fields = CASES[case]
    path = checkpoints.build(family, tmp_path, **fields)
    own, other = load_both(path, monkeypatch, dtype=dtype)
    assert len(read) == 1
    assert_same(own, other)


def test_rounded_weights_are_the_same(
    read: list[DenseModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.build("qwen3", tmp_path)
    own, other = load_both(path, monkeypatch, quantize="int8", dtype="bfloat16")
    assert len(read) == 1
    assert_same(own, other)


def test_tensors_of_mixed_dtypes(
    read: list[DenseModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        ("qwen3-moe", {}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **ROPE}}),
        ("gemma2", {}),
    ],
)
def test_others_go_through_transformers(
    family: str, fields: dict[str, Any], read: list[DenseModel], tmp_path: Path
) -> None:
    load(checkpoints.build(family, tmp_path, **fields))
    assert not read


def test_a_tensor_too_many_goes_through_transformers(read: list[DenseModel], tmp_path: Path) -> None:
    """transformers ignores what its list says: old Llama checkpoints have frequencies in each layer."""
    path = checkpoints.build("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    load(path)
    assert not read


def test_without_kernels_modules_run(
    read: list[DenseModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
