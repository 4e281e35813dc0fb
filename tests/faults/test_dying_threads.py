"""A real server whose step thread dies: clients get 503, the log the traceback, the shell exit code 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from stemma.model.files.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_dead_step_thread_ends_the_server(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", hidden_size=96, num_layers=2)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tests.faults.dying_server", "serve", str(model), "--port", "0"]
    flags = ["--kv-cache-memory", "1MB", "--num-threads", "1"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("Ready:"))
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=30.0)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_failed"
        assert "thread stemma-steps failed: SystemExit: out of luck" in answer.json()["error"]["message"]
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert "this process ends with code 1: start it again" in log.read_text()
    assert "Traceback" in log.read_text()
    assert "out of luck" in log.read_text()
