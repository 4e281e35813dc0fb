"""`stemma doctor`: the report is whole, and what can't work is named and fails the command."""

from __future__ import annotations

import importlib.metadata
import json
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner, Result

from stemma.cli import make_app
from stemma.cli.doctor.listening import ports_open_to_all
from stemma.errors import ConfigError
from stemma.model.files.tiny import save_checkpoint
from stemma.native.levels import LEVELS, available_levels
from tests.checkpoints import make_model, tokenizer
from tests.memory.tiers.pool.servers import MooncakeMaster


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["doctor", *arguments])


def report(*arguments: str) -> dict:
    return orjson.loads(doctor("--json", *arguments).stdout)


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled for these tests."""
    monkeypatch.setenv("STEMMA_NATIVE", "0")


def test_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)  # the tests' own
    found = report("--num-threads", "2")

    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["processor"]["num_usable_cores"] >= 1
    assert found["kernels"]["levels"] == [level.name for level in available_levels()]
    assert found["kernels"]["int8_products"] == "none"
    assert found["threads"] == {
        "num_threads": 2,
        "origin": "the setting num_threads",
        "environment": {"OMP_NUM_THREADS": "3"},
    }
    assert 0 < found["memory"]["free_bytes"] <= found["memory"]["total_bytes"]
    assert found["gpu"]["state"] == "the CUDA path has run twice, on an H100: small models, no ranks"
    assert found["tiers"] == {"host_bytes": None, "disk": None, "pool": None}
    assert found["cache_folder"]["problem"] is None


def test_the_text_says_what_is_lost_without_kernels() -> None:
    result = doctor()

    assert result.exit_code == 1
    assert "STEMMA_NATIVE=0 switches the kernels off" in result.stdout
    assert "wrong: no kernels" in result.stdout
    assert "at about half the speed" in result.stdout


def test_tiers_that_work_are_no_problem(tmp_path: Path) -> None:
    pool = tmp_path / "pool.toml"
    pool.write_text(f'path = "{tmp_path / "pool"}"')
    flags = ("--disk-cache", str(tmp_path / "disk"), "--disk-cache-size", "1MB", "--host-cache", "1MB")
    found = report(*flags, "--pool", "directory", "--pool-config", str(pool))

    assert found["tiers"]["host_bytes"] == 10**6
    assert found["tiers"]["disk"]["folder"]["problem"] is None
    assert found["tiers"]["pool"] == {"name": "directory", "problem": None, "ports_open_to_all": []}
    assert [problem.split(":")[0] for problem in found["problems"]] == ["no kernels"]
    assert not (tmp_path / "disk").exists()


def test_tiers_that_cannot_work_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = ("--disk-cache", str(tmp_path / "file" / "disk"), "--host-cache", "900TB", "--pool", "directory")
    found = report(*flags)

    [host, disk, pool, _] = found["problems"]
    assert host.startswith("host tier: 900.0 TB asked for, but only")
    assert disk.startswith("disk tier: can't write into")
    assert pool == "pool directory: path: Field required"


def test_a_wrong_setting_is_an_error() -> None:
    missing = [level.name for level in LEVELS if level not in available_levels()]
    for arguments in (("--block-size", "0"), *(("--isa", name) for name in missing)):
        assert isinstance(doctor(*arguments).exception, ConfigError)


def test_ports_on_all_interfaces_are_told_from_others() -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as open_to_all,
        socket.create_server(("127.0.0.1", 0)) as here_only,
    ):
        found = ports_open_to_all()
        port = open_to_all.getsockname()[1]
        assert port in found
        assert here_only.getsockname()[1] not in found
    assert port not in ports_open_to_all()


def test_mooncakes_client_listens_on_all_interfaces_and_doctor_says_so(tmp_path: Path) -> None:
    pytest.importorskip("mooncake.store", reason="the extra `mooncake` isn't installed")
    master, file = MooncakeMaster(), tmp_path / "pool.json"
    try:
        file.write_text(json.dumps(master.config()))
        result = doctor("--pool", "mooncake", "--pool-config", str(file))
    finally:
        master.stop()
    [line] = [line for line in result.stdout.splitlines() if line.startswith("pool")]
    assert "answers; its client listens on all interfaces (ports " in line


def test_a_model_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    result = doctor(str(tmp_path / "none"))
    assert result.exit_code == 1
    assert f"{tmp_path / 'none'}: no checkpoint directory" in result.stdout
    assert "nothing is wrong" not in result.stdout
    (tmp_path / "config.json").write_text("{")
    assert any(str(tmp_path) in problem for problem in report(str(tmp_path))["problems"])


def test_a_model_is_described(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0)
    path = save_checkpoint(make_model(config, 0), tokenizer(), tmp_path)
    found = report(str(path))["model"]
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["max_model_len"] > 0
    assert found["weight_bytes"] > 0
    assert found["problems"] == []
    assert report()["model"] is None


def test_a_buffer_that_holds_less_than_a_step_is_told(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0)
    path = save_checkpoint(make_model(config, 0), tokenizer(), tmp_path / "model")
    disk = ["--disk-cache", str(tmp_path / "disk"), "--disk-cache-size", "50MB"]
    small = report(str(path), *disk, "--transfer-buffer", "64KB")["model"]["problems"]
    assert any("a step commits up to 32" in one for one in small), small
    assert not any("transfer_buffer" in one for one in report(str(path), *disk)["model"]["problems"])
