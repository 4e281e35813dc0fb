"""Small things that a newcomer tries: the version, completion, leaving, stopping, progress in a pipe."""

from __future__ import annotations

import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import stemma
from stemma.cli import make_app
from stemma.cli.progress import LineProgress, StepCounter, open_progress
from tests.cli.terminal import terminal


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stemma", *arguments], capture_output=True, text=True, timeout=60
    )


def test_version() -> None:
    assert run("--version").stdout == f"stemma {stemma.__version__}\n"


def test_serve_alone_says_what_to_type() -> None:
    ended = run("serve")
    assert ended.returncode == 2
    for word in ("demo", ".gguf", "directory", "stemma serve Qwen/Qwen2.5-0.5B-Instruct"):
        assert word in ended.stderr


def test_completion_of_commands_and_their_options() -> None:
    assert "--install-completion" in CliRunner().invoke(make_app(), ["--help"]).output
    for typed, expected in (("stemma se", "serve"), ("stemma serve --host-c", "--host-cache")):
        completed = CliRunner().invoke(
            make_app(),
            [],
            prog_name="stemma",
            env={
                "_STEMMA_COMPLETE": "complete_bash",
                "COMP_WORDS": typed,
                "COMP_CWORD": str(len(typed.split()) - 1),
            },
        )
        assert expected in completed.output.split()


def test_q_leaves_top(live_url: str) -> None:
    with terminal(["top", "--url", live_url]) as top:
        top.wait_for("device")
        top.type("q")
        assert top.wait(20) == 0


def test_plain_lines_in_a_pipe() -> None:
    written = StringIO()
    lines = LineProgress("loading", Console(file=written), quiet_s=0.05, every_s=60.0)
    lines("reading weights", 0.1)
    assert written.getvalue() == ""  # quick commands print nothing
    deadline = time.monotonic() + 10.0
    while not written.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    lines("reading weights", 0.5)  # the same stage: once in a while
    lines("packing", None)
    lines.close()
    assert written.getvalue() == "reading weights: 10%\npacking\n"


def test_a_bar_on_a_terminal_goes_when_its_work_is_done() -> None:
    written = StringIO()
    with open_progress("replaying", Console(file=written, force_terminal=True)) as progress:
        assert list(StepCounter(progress, "lru", 3).over("abc")) == list("abc")
    assert "lru" in written.getvalue()


@pytest.mark.parametrize("command", ["replay", "order"])
def test_results_alone_are_on_stdout(command: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
    trace.write_text(line * 3)
    ended = run(command, str(trace), "--capacity", "10")
    assert ended.returncode == 0, ended.stderr
    assert "reading" not in ended.stdout
