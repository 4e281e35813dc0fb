"""``stemma config`` and ``mindieservice_daemon``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.cli.mindie_daemon import CONFIG_VARIABLE, command
from stemma.errors import ConfigError

MINDIE = {
    "ServerConfig": {"httpsEnabled": False, "port": 2025},
    "BackendConfig": {
        "ModelDeployConfig": {
            "ModelConfig": [
                {"modelWeightPath": "/w", "plugin_params": '{"plugin_type": "prefix_cache"}', "tp": 8}
            ]
        },
        "ScheduleConfig": {"cacheBlockSize": 32},
    },
}


def test_check_shows_what_a_file_sets_and_what_has_no_effect(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MINDIE))
    result = CliRunner().invoke(make_app(), ["config", "check", str(file)])

    assert result.exit_code == 0, result.output
    assert "  block_size = 32\n" in result.output
    assert "  port = 2025\n" in result.output
    assert "accepted without effect: tp" in result.output
    assert "not on this machine: the checkpoint /w" in result.output


def test_check_names_certificates_that_are_not_there(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**MINDIE, "ServerConfig": {}}))
    result = CliRunner().invoke(make_app(), ["config", "check", str(file)])

    assert result.exit_code == 0, result.output
    assert f"not on this machine: TLS: can't read {tmp_path}/security/certs/server.pem" in result.output


def test_check_of_a_wrong_file_fails(tmp_path: Path) -> None:
    file = tmp_path / "stemma.toml"
    file.write_text("[cache]\nblock_sise = 3\n")
    result = CliRunner().invoke(make_app(), ["config", "check", str(file)])

    assert isinstance(result.exception, ConfigError)
    assert "block_size" in str(result.exception)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("cacheBlockSize", "becomes: block_size"),
        ("ScheduleConfig.cacheBlockSize", "default: 128; at least 1, at most 128"),
        ("npuDeviceIds", "accepted without effect"),
        ("block_size", "flag --block-size, variable STEMMA_BLOCK_SIZE, in the file: [cache] block_size"),
        ("--tls-cert", "flag --tls-cert"),
    ],
)
def test_explain(key: str, expected: str) -> None:
    result = CliRunner().invoke(make_app(), ["config", "explain", "--", key])

    assert result.exit_code == 0
    assert expected in result.output


def test_explain_without_a_key_lists_everything_and_a_wrong_key_names_the_nearest() -> None:
    everything = CliRunner().invoke(make_app(), ["config", "explain"]).output
    wrong = CliRunner().invoke(make_app(), ["config", "explain", "cacheBlokSize"])

    assert "kvPoolConfig.asyncWrite: works" in everything
    assert "enable_prefix_cache: " in everything
    assert "'cacheBlockSize'" in str(wrong.exception)


def test_the_daemon_names_the_file_it_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no configuration at conf/config\.json"):
        command()
    monkeypatch.setenv(CONFIG_VARIABLE, "/nowhere/config.json")
    with pytest.raises(ConfigError, match=r"/nowhere/config\.json"):
        command()
