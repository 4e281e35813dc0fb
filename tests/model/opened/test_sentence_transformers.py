"""What files of sentence-transformers say, and what is refused of them; nobody vouches for their contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.pooled_checkpoints import PROMPTS, build_classifier, build_embedding, write, write_modules

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError, UnsupportedModel
from stemma.model.load.loading import load_model
from stemma.model.load.plan import LoadPlan
from stemma.model.opened.abilities import Abilities, EmbeddingFormat, ScoreTokens
from stemma.model.opened.sentence_transformers import read_modules
from stemma.native.library import load_kernels
from stemma.supervision import LoggingSupervisor


def embedding_of(path: Path) -> EmbeddingFormat:
    found = read_modules(path, 64)
    assert isinstance(found, EmbeddingFormat)
    return found


def test_a_checkpoint_without_modules_is_for_text(tmp_path: Path) -> None:
    assert read_modules(tmp_path, 64) is None


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": False}, "last"),
    ],
)
def test_kinds_of_pooling(tmp_path: Path, pooling: dict[str, Any], kind: str) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"])
    write(tmp_path / "1_Pooling" / "config.json", pooling)
    assert embedding_of(tmp_path) == EmbeddingFormat(kind, 64, normalizes=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pooling",
    [
        {},
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": ["mean", "lasttoken"]},
        {"pooling_mode": 5},
        {"pooling_mode": [["mean"]]},
        {"pooling_mode": "weightedmean"},
        {"pooling_mode": "mean", "include_prompt": False},
    ],
)
def test_poolings_that_are_refused(tmp_path: Path, pooling: dict[str, Any]) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"])
    write(tmp_path / "1_Pooling" / "config.json", pooling)
    with pytest.raises(UnsupportedModel, match="1_Pooling"):
        read_modules(tmp_path, 64)


@pytest.mark.parametrize(
    "modules",
    [
        {},
        [5],
        [{"type": "Transformer", "path": 5}],
        [{"path": ""}],
        [{"type": "models.Pooling", "path": "../elsewhere"}],
        [{"type": "models.Pooling", "path": "/etc"}],
        [{"type": "models.Pooling", "path": ".."}],
    ],
)
def test_damaged_modules(tmp_path: Path, modules: Any) -> None:
    write(tmp_path / "modules.json", modules)
    with pytest.raises(ModelError, match=r"modules\.json|can't read"):
        read_modules(tmp_path, 64)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, '"\ud800"'])
def test_modules_that_are_no_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"can't read .*modules\.json"):
        read_modules(tmp_path, 64)


@pytest.mark.parametrize(
    "names",
    [
        ["Transformer", "Pooling", "Dense"],
        ["Transformer", "Pooling", "Pooling"],
        ["Transformer", "Normalize"],
        ["Transformer", "Pooling", "LogitScore"],
    ],
)
def test_modules_that_are_not_served(tmp_path: Path, names: list[str]) -> None:
    write_modules(tmp_path, names)
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    with pytest.raises(UnsupportedModel, match=names[-1]):
        read_modules(tmp_path, 64)


@pytest.mark.parametrize("false_id", [None, -1, "no", True])
def test_tokens_of_a_score(tmp_path: Path, false_id: Any) -> None:
    write_modules(tmp_path, ["Transformer", "LogitScore"])
    write(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": 3, "false_token_id": 4})
    assert read_modules(tmp_path, 64) == ScoreTokens(3, 4)
    write(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": 3, "false_token_id": false_id})
    with pytest.raises(UnsupportedModel, match="false_token_id"):
        read_modules(tmp_path, 64)


@pytest.mark.parametrize(
    "prompts",
    [{"prompts": {"query": 5}}, {"prompts": ["x"]}, {"prompts": {}, "default_prompt_name": "query"}],
)
def test_damaged_prompts(tmp_path: Path, prompts: dict[str, Any]) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"])
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    write(tmp_path / "config_sentence_transformers.json", prompts)
    with pytest.raises(ModelError, match="prompt"):
        read_modules(tmp_path, 64)


def test_default_prompt_and_case(tmp_path: Path) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"])
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    named = {"prompts": PROMPTS, "default_prompt_name": "query"}
    write(tmp_path / "config_sentence_transformers.json", named)
    assert embedding_of(tmp_path).prompt(None) == PROMPTS["query"]
    assert embedding_of(tmp_path).prompt("document") == ""
    write(tmp_path / "sentence_bert_config.json", {"do_lower_case": True})
    with pytest.raises(UnsupportedModel, match="lower case"):
        read_modules(tmp_path, 64)


def test_models_that_attend_in_both_directions(tmp_path: Path) -> None:
    path = build_embedding(tmp_path / "model", is_causal=False)
    with pytest.raises(UnsupportedModel, match="both directions"):
        load_model(ModelSettings(path=path))


def test_a_damaged_head_of_scores(tmp_path: Path) -> None:
    path = build_classifier(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    damaged = {**weights, "score.weight": weights["score.weight"] * float("nan")}
    save_file(damaged, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="NaN"):
        load_model(ModelSettings(path=path))
    del damaged["score.weight"]
    save_file(damaged, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no score\.weight"):
        load_model(ModelSettings(path=path))


@pytest.mark.skipif(load_kernels() is None, reason="without kernels nothing is packed")
def test_a_model_without_a_head_is_packed_early(tmp_path: Path) -> None:
    path = build_embedding(tmp_path / "model")
    settings = ModelSettings(path=path, device="cpu")
    plan = LoadPlan(settings, LoggingSupervisor(), is_whole=True)
    assert plan.packing is not None
    try:
        model = load_model(settings, plan=plan)
    finally:
        plan.close()
    assert model.abilities == Abilities(
        generates=False, embedding=EmbeddingFormat("last", 64, True, PROMPTS), is_qwen3=True
    )
    assert model.info == load_model(settings).info
