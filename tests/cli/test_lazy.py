"""Nothing is imported before it is needed."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import stemma.cli
from stemma.cli import COMMANDS, load_command, make_app
from stemma.cli.ready_line import READY
from stemma.native.library import load_kernels
from tests import checkpoints

SRC = Path(stemma.cli.__file__).parents[2]
NEVER_AT_START = (
    *("transformers.modeling_utils", "transformers.generation.utils", "transformers.quantizers"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "accelerate"),
    *(
        "scipy",
        "pandas",
        "peft",
        "plotly",
        "sqlalchemy",
        "ray",
        "cryptography",
        "httpx",
        "gguf",
        "compressed_tensors",
    ),
    *("stemma_mindie.config", "stemma_mindie.modelslim", "stemma_lab.advice"),
    *("stemma_router", "stemma_connect"),
)
"""What a server of a plain dense model needs only if it is asked to do more."""
HEAVY = ("torch", "transformers", "numpy", "fastapi", "pydantic", "sqlalchemy", "httpx", "stemma.config")


def imported_by(*arguments: str) -> set[str]:
    """Return the modules that `stemma ARGUMENTS` imports in a process of its own."""
    code = (
        "import sys\nfrom stemma.cli import main\n"
        f"sys.argv = ['stemma', *{list(arguments)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('\\nMODULES', *sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(done.stdout.split("MODULES", 1)[1].split())


def test_help_imports_no_command() -> None:
    modules = imported_by("--help")
    assert not modules & set(HEAVY)
    assert {name for name in modules if name.startswith("stemma.")} == {
        "stemma.cli",
        "stemma.errors",
        "stemma.guests",
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("command", ["serve", "chat", "config", "doctor"])
def test_help_of_a_command_needs_no_torch(command: str) -> None:
    assert not imported_by(command, "--help") & {"torch", "transformers"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_what_the_command_says(name: str) -> None:
    command = load_command(name)
    assert command.help is not None
    assert inspect.cleandoc(command.help).splitlines()[0] == COMMANDS[name][1]


def test_every_command_is_listed_and_answers() -> None:
    runner = CliRunner(env={"COLUMNS": "200"})
    listed = runner.invoke(make_app(), ["--help"]).output
    for name in COMMANDS:
        assert name in listed
        result = runner.invoke(make_app(), [name, "--help"])
        assert result.exit_code == 0
        assert "Usage" in result.output
        assert "--install-completion" not in result.output


def test_unknown_command() -> None:
    result = CliRunner().invoke(make_app(), ["sevre"])
    assert result.exit_code == 2
    assert "serve" in result.output
    assert isinstance(typer.main.get_command(make_app()), stemma.cli.LazyCommands)


@pytest.mark.slow
def test_a_server_without_a_ledger_needs_no_sqlalchemy() -> None:
    code = "import sys, stemma.server.runtime\nprint('sqlalchemy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.one_in(2)
@pytest.mark.skipif(load_kernels() is None, reason="without kernels transformers' modules run")
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_server_of_a_dense_model_imports_what_it_runs(family: str, tmp_path: Path) -> None:
    """Each of these takes some tenths of a second of a start."""
    model = checkpoints.build(family, tmp_path / family)
    code = (
        "import signal, sys\nfrom stemma.cli import main\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('MODULES', *sys.modules, flush=True))\n"
        f"sys.argv = ['stemma', 'serve', {str(model)!r}, '--port', '0', '--kv-cache-memory', '4MB']\nmain()\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert any(line.startswith(READY) for line in server.stdout)
        server.send_signal(signal.SIGUSR1)
        modules = next(set(line.split()) for line in server.stdout if line.startswith("MODULES"))
        server.terminate()
        server.communicate(timeout=60)
    finally:
        server.kill()
    assert "torch" in modules
    assert sorted(modules & set(NEVER_AT_START)) == []
