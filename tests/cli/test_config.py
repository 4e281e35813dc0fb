"""``stemma config``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stemma import guests
from stemma.cli import make_app
from stemma.errors import ConfigError, StemmaError
from stemma.model.files.tiny import write_tiny_model
from tests.adapters import write_adapter
from tests.cli.checked import check, serve
from tests.hybrids import build
from tests.ports import free_port


def toml(tmp_path: Path, *lines: str, memory: str = "1MB") -> Path:
    """Return a settings file for a tiny model of hidden size 96."""
    model = write_tiny_model(tmp_path / "tiny", hidden_size=96, num_layers=1)
    file = tmp_path / "stemma.toml"
    head = ["[server]", f"port = {free_port()}", "[model]", f'path = "{model}"']
    file.write_text("\n".join([*head, "[cache]", f'kv_cache_memory = "{memory}"', *lines]))
    return file


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["block_size = 1024"], "but one block of 1024 tokens takes"),
        (["block_size = 1024", "[tiers]", 'host_cache = "64KB"'], "host cache of 64000 bytes can't hold one"),
        (
            ["block_size = 1024", "[tiers]", 'disk_cache = "DISK"', 'disk_cache_size = "100KB"'],
            "disk cache of 100000 bytes can't hold one",
        ),
        (["block_size = 15", "[parallel]", "context_parallel_size = 2"], "doesn't go with block_size 15"),
        (['kv_layout = "nz"'], "kv_layout nz (enable_nz) is for models that cache latents"),
    ],
    ids=["device", "host", "disk", "ranks", "layout"],
)
def test_check_and_serve_refuse_blocks_that_fit_no_tier_before_the_load(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    lines = [line.replace("DISK", str(tmp_path / "disk")) for line in lines]
    file = toml(tmp_path, *lines, memory="100KB" if len(lines) == 1 else "1MB")
    checked = check(file)
    assert isinstance(checked.exception, ConfigError)
    assert message in str(checked.exception)
    served = serve(file)
    assert isinstance(served.exception, ConfigError)
    assert str(served.exception) == str(checked.exception)
    assert "loading weights" not in served.output


def test_check_and_serve_refuse_a_tier_without_room_for_two_states(tmp_path: Path) -> None:
    model = build("qwen3_next", tmp_path / "hybrid")
    file = tmp_path / "stemma.toml"
    head = ["[server]", f"port = {free_port()}", "[model]", f'path = "{model}"', "[cache]"]
    file.write_text("\n".join([*head, "block_size = 16", 'kv_cache_memory = "40KB"']))
    checked, served = check(file), serve(file)
    assert "recurrent states" in str(checked.exception)
    assert isinstance(served.exception, StemmaError)
    assert str(served.exception) == str(checked.exception)


def test_check_reads_adapters_and_compares_them_with_the_layers(tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn.q_proj"
    fits = write_adapter(tmp_path / "fits", {layer: (torch.zeros(4, 96), torch.zeros(96, 4))})
    other = write_adapter(tmp_path / "other", {layer: (torch.zeros(4, 64), torch.zeros(96, 4))})
    wide = write_adapter(tmp_path / "wide", {layer: (torch.zeros(80, 96), torch.zeros(96, 80))})
    for path, message in (
        (fits, None),
        (other, "was the adapter trained for another model?"),
        (wide, "has rank 80"),
        (tmp_path / "nowhere", "holds no adapter"),
    ):
        file = toml(tmp_path, "[lora.adapters]", f'sql = "{path}"')
        checked = check(file)
        if message is None:
            assert checked.exit_code == 0, checked.output
            continue
        assert message in str(checked.exception)
        served = serve(file)
        assert isinstance(served.exception, StemmaError)
        assert str(served.exception) == str(checked.exception)


def test_check_writes_into_the_disk_tiers_directory_and_measures_its_room(tmp_path: Path) -> None:
    blocked = tmp_path / "plain-file"
    blocked.write_text("x")
    file = toml(tmp_path, "[tiers]", f'disk_cache = "{blocked / "cache"}"')
    checked, served = check(file), serve(file)
    assert f"disk_cache: can't write into {blocked}" in str(checked.exception)
    assert isinstance(served.exception, StemmaError)
    assert str(served.exception) == str(checked.exception)
    large = toml(tmp_path, "[tiers]", f'disk_cache = "{tmp_path / "cache"}"', 'disk_cache_size = "900TB"')
    result = check(large)
    assert result.exit_code == 0, result.output
    assert "but the disk has room for" in result.output
    assert not (tmp_path / "cache").exists(), "a check makes nothing"


def test_check_says_if_the_weights_may_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toml(tmp_path)
    monkeypatch.setattr("stemma.engine.preflight.available_bytes", lambda: 1_050_000)
    result = check(file)
    assert result.exit_code == 0, result.output
    assert "of memory are available" in result.output


def test_check_of_a_wrong_file_fails(tmp_path: Path) -> None:
    file = tmp_path / "stemma.toml"
    file.write_text("[cache]\nblock_sise = 3\n")
    result = CliRunner().invoke(make_app(), ["config", "check", str(file)])

    assert isinstance(result.exception, ConfigError)
    assert "block_size" in str(result.exception)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("block_size", "flag --block-size, variable STEMMA_BLOCK_SIZE, in the file: [cache] block_size"),
        ("--tls-cert", "flag --tls-cert"),
    ],
)
def test_explain(key: str, expected: str) -> None:
    result = CliRunner().invoke(make_app(), ["config", "explain", "--", key])
    assert result.exit_code == 0
    assert expected in result.output


def test_explain_without_a_key_lists_everything_and_a_wrong_key_names_the_nearest() -> None:
    assert "enable_prefix_cache: " in CliRunner().invoke(make_app(), ["config", "explain"]).output
    wrong = CliRunner().invoke(make_app(), ["config", "explain", "block_sise"])
    assert "'block_size'" in str(wrong.exception)


def test_a_file_that_no_installed_package_reads_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "entry_points", lambda **_: [])
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert "pip install ./packages/mindie" in str(check(file).exception)
    assert CliRunner().invoke(make_app(), ["config", "explain"]).exit_code == 0
