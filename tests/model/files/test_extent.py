"""Numbers in config.json that would take all time or all memory: refused before anything is built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests import checkpoints
from transformers import GPT2Config, MixtralConfig

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError
from stemma.model.files.extent import check_counts
from stemma.model.files.tiny import save_checkpoint
from stemma.model.load.loading import load_model

HUGE = 1_000_000_000
FAMILIES = ("llama", "qwen2", "qwen3-moe", "gemma2", "deepseek-v3", "gpt-oss", "mixtral", "gpt2")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("m")
    others = {
        "mixtral": MixtralConfig(**checkpoints.base_fields(num_local_experts=4)),
        "gpt2": GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    }
    found = {name: checkpoints.build(name, folder / name) for name in FAMILIES if name not in others}
    for name, config in others.items():
        model = checkpoints.make_model(config, 0)
        found[name] = save_checkpoint(model, checkpoints.tokenizer(), folder / name, None)
    return found


def load(source: Path, target: Path, fields: dict[str, Any]) -> None:
    """Load a copy of a checkpoint with other fields in its config; those of value ... are left out."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not ...}
    (target / "config.json").write_text(json.dumps(config))
    load_model(ModelSettings(path=target, device="cpu"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [HUGE, 10**40, 4097])
def test_more_layers_than_any_model(
    families: dict[str, Path], tmp_path: Path, family: str, count: int
) -> None:
    field = "n_layer" if family == "gpt2" else "num_hidden_layers"
    with pytest.raises(
        ModelError, match=rf"config\.json says that {field} is .* no model has more than 4096"
    ):
        load(families[family], tmp_path, {field: count, "layer_types": ...})


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2"])
def test_more_layers_than_tensors(families: dict[str, Path], tmp_path: Path, family: str) -> None:
    with pytest.raises(ModelError, match=r"num_hidden_layers is 4000, but the files have \d+ tensors"):
        load(families[family], tmp_path, {"num_hidden_layers": 4000, "layer_types": ...})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("qwen3-moe", "num_local_experts"),
        ("deepseek-v3", "n_routed_experts"),
        ("gpt-oss", "num_local_experts"),
    ],
)
@pytest.mark.parametrize("count", [HUGE, 60_000])
def test_more_experts_than_the_files_hold(
    families: dict[str, Path], tmp_path: Path, family: str, field: str, count: int
) -> None:
    told = rf"says that {field} is {count}" if count == HUGE else "config.json makes a model of"
    with pytest.raises(ModelError, match=told):
        load(families[family], tmp_path, {field: count})


@pytest.mark.parametrize("size", [HUGE, 500_000])
@pytest.mark.parametrize(
    ("family", "field"),
    [
        *((family, "vocab_size") for family in FAMILIES),
        *((family, "intermediate_size") for family in ("llama", "gemma2", "gpt-oss", "mixtral")),
        *((family, "head_dim") for family in ("llama", "qwen3-moe", "gemma2", "gpt-oss")),
        ("qwen2", "hidden_size"),
        ("qwen3-moe", "moe_intermediate_size"),
        ("deepseek-v3", "kv_lora_rank"),
        ("deepseek-v3", "qk_rope_head_dim"),
        ("deepseek-v3", "n_shared_experts"),
        ("mixtral", "num_attention_heads"),
        ("gpt2", "n_embd"),
        ("gpt2", "n_positions"),
    ],
)
def test_larger_than_the_files(
    families: dict[str, Path], tmp_path: Path, family: str, field: str, size: int
) -> None:
    told = r"config\.json makes a model of [\d,]+ numbers|no model has more than|can't load"
    with pytest.raises(ModelError, match=told):
        load(families[family], tmp_path, {field: size})


@pytest.mark.parametrize("where", ["text_config", "decoder"])
def test_counts_of_a_part(families: dict[str, Path], tmp_path: Path, where: str) -> None:
    with pytest.raises(ModelError, match="num_layers is 1000000000"):
        load(families["llama"], tmp_path, {where: {"deeper": {"num_layers": HUGE}}})


@pytest.mark.parametrize("count", [0, 100, -1])
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "qwen3-moe", "deepseek-v3"])
def test_experts_of_a_token(families: dict[str, Path], tmp_path: Path, family: str, count: int) -> None:
    with pytest.raises(ModelError, match=r"can't run|doesn't compute|gives a token -?\d+ of"):
        load(families[family], tmp_path, {"num_experts_per_tok": count})


def test_a_field_with_a_name_of_a_megabyte(tmp_path: Path) -> None:
    """It is no count; searching it would take time that grows with the square of its length."""
    check_counts(tmp_path, {"n_" * 500_000: HUGE})
