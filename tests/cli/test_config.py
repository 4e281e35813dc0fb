"""``stemma config`` and ``mindieservice_daemon``."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from stemma.cli import make_app
from stemma.cli.mindie_daemon import CONFIG_VARIABLE, command
from stemma.errors import ConfigError, StemmaError
from stemma.model.tiny import write_tiny_model
from stemma.server import runtime
from tests.adapters import write_adapter
from tests.hybrids import build
from tests.server.routing.ports import free_port

SOURCE = Path(__file__).parents[2] / "src"

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


def check(file: Path) -> Result:
    return CliRunner().invoke(make_app(), ["config", "check", str(file)])


def serve(file: Path) -> Result:
    """Run `stemma serve`, here, on a file that it refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "serve", lambda *_: pytest.fail("it serves"))
        patch.setattr(gc, "freeze", lambda: None)
        return CliRunner(env={"STEMMA_NUM_THREADS": "1"}).invoke(make_app(), ["serve", "--config", str(file)])


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
