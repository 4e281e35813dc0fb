"""`stemma pool`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import hybrids
from tests.checkpoints import FAMILIES, build
from typer.testing import CliRunner

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError
from stemma.model.load.loading import load_model
from stemma_lab.commands.pool import app, layout_of


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_plan_as_json() -> None:
    printed = json.loads(
        run(
            "plan",
            "--nodes",
            "8",
            "--devices-per-node",
            "16",
            "--json",
            "--bytes-per-token",
            "1000",
            "--dram",
            "1GB",
        )
    )
    assert printed["plan"]["link_bytes"] == 508_000_000
    assert printed["plan"]["memory_fraction"] == 0.91
    assert printed["tokens"]["dram_tokens"] == 8_000_000


def test_plan_as_a_table_warns_of_too_many_devices() -> None:
    text = run("plan", "--nodes", "64", "--devices-per-node", "16")
    assert "1,023 of at most 512" in text
    assert "0.92 - 0.04 = 0.88" in text
    assert "several pools" in text


def test_list_names_the_built_in_pools() -> None:
    assert {"directory", "mooncake", "redis"} <= set(run("list").split())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_read_from_config_json_is_the_one_the_model_has(family: str, tmp_path: Path) -> None:
    build(family, tmp_path)
    model = load_model(ModelSettings(path=tmp_path, dtype="float32"))
    assert layout_of(tmp_path, "float32") == model.layout(64)
    for kv_dtype in ("int8", "fp8"):
        assert layout_of(tmp_path, kv_dtype) == model.layout(64, kv_dtype)


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_the_layout_has_an_indexers_keys_and_entries(family: str, tmp_path: Path) -> None:
    model = load_model(ModelSettings(path=hybrids.build(family, tmp_path), device="cpu"))
    assert layout_of(tmp_path, "float32") == model.layout(64)


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't read"):
        layout_of(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(ModelError, match="num_attention_heads"):
        layout_of(tmp_path)
    (tmp_path / "config.json").write_text('{"dtype": "int3"}')
    with pytest.raises(ConfigError, match="int3"):
        layout_of(tmp_path)
