"""The commands as a user runs them: real processes on loopback."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType
from rich.console import Console
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.cli.client import make_http
from stemma.cli.demo.stage import Stage
from stemma.cli.demo.steps import CACHE_STEPS
from stemma.cli.server_process import ServerProcess
from stemma.engine.async_engine import AsyncEngine
from stemma.errors import StemmaError
from tests import gguf_files
from tests.e2e.conftest import Served

ROOT = Path(__file__).parents[2]
FLAGS = ("--kv-cache-memory", "4MB", "--block-size", "16", "--num-threads", "1")


def stemma(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stemma", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_serve_answers_and_drains(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("STEMMA_SERVED_NAME", "named-by-the-environment")
    with ServerProcess(tiny_model, FLAGS) as server:
        assert "tokens in blocks of 16; " in server.summary
        assert "radix index, hazard eviction" in server.summary
        [card] = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert card["id"] == "named-by-the-environment"
        body = {"model": card["id"], "prompt": "Hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.wait() == 0


def test_serve_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    path = gguf_files.build("qwen2", tmp_path, GGMLQuantizationType.Q8_0).path
    with ServerProcess(path, FLAGS) as server:
        assert "Qwen2ForCausalLM" in server.summary
        assert "Q8_0" in server.summary
        [card] = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert card["id"] == "model"
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        for num_cached in (0, 8):
            usage = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= num_cached


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("MODEL", "--config", "FILE"), "unknown setting 'cache.blok_size'"),
        ((), "no model given"),
        (("no/such/model",), "no checkpoint directory at no/such/model"),
        (("no/such.gguf",), "no GGUF file at no/such.gguf"),
        (("MODEL", "--block-size", "0"), "--block-size = 0"),
        (("MODEL", "--port", "0", "--device", "abacus"), "unknown device 'abacus'"),
    ],
)
def test_serve_says_what_is_wrong(
    tiny_model: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "stemma.toml"
    file.write_text("[cache]\nblok_size = 16\n")
    names = {"MODEL": str(tiny_model), "FILE": str(file)}
    result = CliRunner().invoke(make_app(), ["serve", *(names.get(a, a) for a in arguments)])

    assert isinstance(result.exception, StemmaError)
    assert message in str(result.exception)


def test_errors_are_one_line() -> None:
    result = stemma("serve", "no/such/model")

    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: no checkpoint directory at no/such/model; give the path of a downloaded one"
    ]


def test_server_process_reports_why_it_did_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    with pytest.raises(StemmaError, match="did not start"):
        ServerProcess(tmp_path / "none").start()


def test_chat_shows_what_each_turn_reuses(served: Served) -> None:
    typed = "Hello there, how are you?\nAnd tomorrow?\n/tree\n/reset\n/quit\n"
    result = CliRunner().invoke(
        make_app(), ["chat", served.url, "--max-tokens", "8", "--temperature", "0"], input=typed
    )

    assert result.exit_code == 0, result.output
    assert "0 cached (0 %)" in result.output
    assert result.output.count("prompt tokens") == 2
    assert "default namespace" in result.output


def test_demo_steps(served: Served) -> None:
    """The steps that need no tiers, against a server that runs already."""
    output = io.StringIO()
    console = Console(file=output, width=100, highlight=False)
    server = ServerProcess(Path("unused"))
    server.url = served.url

    async def run() -> None:
        async with make_http(served.url) as http:
            for step in CACHE_STEPS:
                await step(Stage(console, server, http, "tiny"))

    asyncio.run(run())
    text = output.getvalue()
    assert "Nothing in the cache begins like this prompt" in text
    assert "and the same answer" in text
    assert "second round" in text
    assert text.count("question ") >= 16
    assert "default namespace" in text
    assert "from cache" in text.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.real_model
def test_demo_as_a_user_runs_it(real_model: Path) -> None:
    result = stemma("demo", COLUMNS="100")

    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    handbook = next(line for line in lines if line.startswith("the handbook"))
    restarted = next(line for line in lines if line.startswith("after the restart"))
    assert result.stdout.count("nine in the morning") >= 5
    again = next(line for line in lines if line.startswith("asked again"))
    assert re.search(r"([1-9]\d*) of \d+ draft tokens held", again)
    assert "from host" in handbook
    assert "from disk" in restarted
    assert "Done in" in lines[-1]


@pytest.mark.parametrize("ledger", ["nosuch://host/db", "/nowhere/usage.db"])
def test_a_ledger_that_cannot_be_used_is_told_before_the_model_is_loaded(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, ledger: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(AsyncEngine, "from_settings", refuse)
    result = CliRunner().invoke(make_app(), ["serve", str(tiny_model), "--port", "0", "--ledger", ledger])
    assert isinstance(result.exception, StemmaError)
    assert "ledger" in str(result.exception)
