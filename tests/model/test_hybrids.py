"""Models with recurrent layers compute what plain transformers does, on every path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError, UnsupportedModel
from stemma.model.cpu.fused import FusedDecoder
from stemma.model.families.registry import FAMILIES
from stemma.model.load import loading
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.parallel.share import Share, check_share
from stemma.native.library import load_kernels
from tests import hybrids
from tests.model.conftest import MODULES, NATIVE, TORCH
from tests.model.paging import PagedSequences, plain_logits

IN_ONE_CALL = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "bamba")
PROMPT = [3 + 7 * number % 500 for number in range(150)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def checkpoint(family: str, root: Path) -> Path:
    path = root / family
    return path if path.exists() else hybrids.build(family, path)


def load(path: Path, way: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    if way != NATIVE:
        monkeypatch.setattr(loading, "fitting_layout", lambda _checkpoint: None)
    if way == TORCH:
        monkeypatch.setattr(loading, "load_kernels", lambda _isa: None)
    return load_model(ModelSettings.model_validate({"path": path, "device": "cpu", "dtype": dtype}))


def logits(model: CausalLM) -> torch.Tensor:
    run = PagedSequences(model, [PROMPT])
    run.step([(0, 70)])
    run.finish(chunk=33)
    return run.logits[0]


def ways_of(family: str) -> tuple[str, ...]:
    if load_kernels() is None:
        return (TORCH,)
    return (NATIVE, MODULES, TORCH) if family in IN_ONE_CALL else (MODULES, TORCH)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "way"), [(f, way) for f in hybrids.ALL for way in ways_of(f)])
def test_logits(family: str, way: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(family, root)
    model = load(path, way, "float32", monkeypatch)
    assert isinstance(model.decoder, FusedDecoder) == (way == NATIVE)
    torch.testing.assert_close(logits(model), plain_logits(path, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", hybrids.ALL)
def test_bfloat16(family: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No further from float32 than transformers is in bfloat16, or nearly so."""
    path = checkpoint(family, root)
    expected = plain_logits(path, PROMPT)

    def error(found: torch.Tensor) -> torch.Tensor:
        return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median()

    ours = error(logits(load(path, NATIVE, "bfloat16", monkeypatch)))
    assert ours < max(0.02, 1.5 * float(error(plain_logits(path, PROMPT, torch.bfloat16))))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "lfm2"])
def test_rounded_weights(family: str, quantize: str, root: Path) -> None:
    fields = {"path": checkpoint(family, root), "device": "cpu", "quantize": quantize}
    expected = plain_logits(checkpoint(family, root), PROMPT)
    found = logits(load_model(ModelSettings.model_validate(fields)))
    error = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median()
    assert error < (0.1 if quantize == "int8" else 0.7)


def test_a_recurrence_that_isnt_known_is_refused_by_name(tmp_path: Path) -> None:
    path = hybrids.build("recurrent_gemma", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"RecurrentGemmaForCausalLM.*Qwen3.*DeepSeek"):
        load_model(ModelSettings(path=path, device="cpu"))


def test_a_choice_that_no_layer_makes_is_refused_by_name(tmp_path: Path) -> None:
    path = hybrids.build("glm_moe_dsa", tmp_path, indexer_types=["shared", "full", "full"])
    with pytest.raises(
        UnsupportedModel, match=r"GlmMoeDsaForCausalLM: layer 0 chooses no tokens.*indexer_types"
    ):
        load_model(ModelSettings(path=path, device="cpu"))


@pytest.mark.parametrize("size", [0, -8, None])
def test_chunks_without_a_length_are_refused_by_name(size: int | None, tmp_path: Path) -> None:
    path = hybrids.build("llama4_text", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"attention_chunk_size": size}))
    with pytest.raises(ModelError, match=f"attention_chunk_size {size}"):
        load_model(ModelSettings(path=path, device="cpu"))


def test_index_keys_are_kept_as_they_were_computed(root: Path) -> None:
    model = load_model(ModelSettings(path=checkpoint("deepseek_v32", root), device="cpu"))
    with pytest.raises(ConfigError, match="leave kv_cache_dtype auto"):
        model.layout(16, "int8")
    with pytest.raises(ConfigError, match="kv_layout rows"):
        model.layout(16, "auto", "nz")


@pytest.mark.parametrize("family", [*hybrids.SPARSE, *hybrids.COMPRESSED])
def test_several_ranks_are_refused_by_name(family: str) -> None:
    config = hybrids.config_of(family)
    [architecture] = [one.architecture for one in FAMILIES if one.model_type == config.model_type]
    with pytest.raises(UnsupportedModel, match=f"{architecture} isn't served on several ranks"):
        check_share(architecture, config, Share(0, 2))
