"""``stemma config`` and ``mindieservice_daemon``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.checked import check, serve
from tests.ports import free_port
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.errors import ConfigError, StemmaError
from stemma.model.files.tiny import write_tiny_model
from stemma_mindie.daemon import CONFIG_VARIABLE, command

SOURCE = Path(__file__).parents[3] / "src"

MINDIE = {
    "ServerConfig": {"httpsEnabled": False, "port": 2025},
    "BackendConfig": {
        "ModelDeployConfig": {
            "ModelConfig": [
                {
                    "modelWeightPath": "/w",
                    "plugin_params": '{"plugin_type": "prefix_cache"}',
                    "cpuMemSize": 0,
                }
            ]
        },
        "ScheduleConfig": {"cacheBlockSize": 32},
    },
}


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return what writes a config.json for a tiny model on free ports, changed as a test asks."""
    model = write_tiny_model(tmp_path / "weights", hidden_size=96, num_layers=1)

    def make(
        one: dict[str, Any] | None = None,
        deploy: dict[str, Any] | None = None,
        *,
        port: int | None = None,
        **backend: Any,
    ) -> Path:
        content: dict[str, Any] = json.loads(json.dumps(MINDIE))
        content["ServerConfig"].update(
            {"port": port or free_port(), "managementPort": free_port(), "metricsPort": free_port()}
        )
        content["BackendConfig"].update(backend)
        deployed = content["BackendConfig"]["ModelDeployConfig"]
        deployed.update({"maxSeqLen": 256, "maxInputTokenLen": 200, **(deploy or {})})
        deployed["ModelConfig"][0].update({"modelWeightPath": str(model), "npuMemSize": 1, **(one or {})})
        file = tmp_path / "config.json"
        file.write_text(json.dumps(content))
        return file

    return make


def stemma(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stemma", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "STEMMA_NUM_THREADS": "1"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def test_check_shows_what_a_file_sets(write: Write) -> None:
    result = check(write())

    assert result.exit_code == 0, result.output
    assert "  block_size = 32\n" in result.output
    assert "config.json is right" in result.output


def test_check_names_certificates_that_are_not_there(write: Write, tmp_path: Path) -> None:
    file = write()
    content = json.loads(file.read_text())
    del content["ServerConfig"]["httpsEnabled"]
    file.write_text(json.dumps(content))

    assert f"TLS: can't read {tmp_path}/security/certs/server.pem" in str(check(file).exception)


def test_check_refuses_a_port_that_is_taken(write: Write) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = str(check(write(port=taken.getsockname()[1])).exception)
    assert "can't listen on 127.0.0.1 port" in found


def test_the_exit_status_of_check_is_that_of_serve(write: Write) -> None:
    file = write({"modelWeightPath": "/nowhere"})
    checked, served = stemma("config", "check", str(file)), stemma("serve", "--config", str(file))

    assert checked.returncode == served.returncode == 2
    assert checked.stderr == served.stderr
    assert f"error: {check(file).exception}\n" == served.stderr


@pytest.mark.parametrize(
    ("one", "deploy", "backend", "message"),
    [
        ({"modelWeightPath": "/nowhere"}, {}, {}, "no checkpoint directory at /nowhere"),
        (
            {},
            {},
            {"kvPoolConfig": {"backend": "directory", "configPath": "/nowhere.json"}},
            "pool configuration /nowhere.json: No such file",
        ),
        ({"plugin_params": '{"plugin_type":"mtp,prefix_cache"}'}, {}, {}, "speculation is mtp, but "),
        ({}, {"maxSeqLen": 1_000_000}, {}, "max_model_len is 1000000, but the model ends at"),
        ({"tp": 5, "worldSize": 5}, {}, {}, "tensor_parallel_size 5 doesn't divide"),
        ({"tp": 2, "worldSize": 8}, {}, {}, "worldSize is 8, but dp 1 x cp 1 x tp 2 is 2"),
        ({"cpuMemSize": 1 << 20}, {}, {}, "make them smaller"),
    ],
    ids=[
        "no checkpoint",
        "no pool file",
        "mtp on a Llama",
        "too long",
        "ranks of no size",
        "wrong product",
        "too much memory",
    ],
)
def test_check_and_serve_refuse_the_same_with_the_same_words(
    write: Write,
    tmp_path: Path,
    one: dict[str, Any],
    deploy: dict[str, Any],
    backend: dict[str, Any],
    message: str,
) -> None:
    file = write(one, deploy, **backend)
    checked, served = check(file), serve(file)

    assert isinstance(checked.exception, StemmaError)
    assert message in str(checked.exception)
    assert isinstance(served.exception, StemmaError), served.output
    said = str(checked.exception).partition(", but ")[0]  # what is available changes from moment to moment
    assert str(served.exception).startswith(said)
    assert message in str(served.exception)


def test_a_pool_that_does_not_answer_is_told(write: Write, tmp_path: Path) -> None:
    """The server starts without it, and tries again."""
    pool = tmp_path / "redis.json"
    pool.write_text(json.dumps({"url": f"redis://127.0.0.1:{free_port()}/0"}))
    checked = check(write({}, {}, kvPoolConfig={"backend": "redis", "configPath": str(pool)}))
    assert checked.exit_code == 0
    assert "pool redis doesn't answer: the server starts without it" in checked.output


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("cacheBlockSize", "becomes: block_size"),
        ("ScheduleConfig.cacheBlockSize", "default: 128; at least 1, at most 128"),
        ("npuDeviceIds", "accepted without effect"),
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
    assert "'cacheBlockSize'" in str(wrong.exception)


def test_the_daemon_names_the_file_it_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no configuration at conf/config\.json"):
        command()
    monkeypatch.setenv(CONFIG_VARIABLE, "/nowhere/config.json")
    with pytest.raises(ConfigError, match=r"/nowhere/config\.json"):
        command()
