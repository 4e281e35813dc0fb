"""A server on several ranks, one of which is killed: clear errors, exit code 1, and a warm restart."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from stemma.cli.server_process import ServerProcess
from tests.checkpoints import build
from tests.engine.ranks.processes import rank_processes

FLAGS = ["--block-size", "8", "--kv-cache-memory", "1MB", "--num-threads", "1"]
FLAGS += ["--load-when", "always", "--load-timeout-s", "20", "--speculation", "off"]
PROMPT = [(11 * i * i + 5 * i) % 400 + 3 for i in range(70)]


def complete(server: ServerProcess, max_tokens: int = 4) -> httpx.Response:
    body = {
        "model": "model",
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["--tensor-parallel-size", "--context-parallel-size"])
def test_a_killed_rank_ends_the_server(kind: str, tmp_path: Path) -> None:
    model = build("llama", tmp_path / "model")
    flags = [*FLAGS, kind, "2", "--disk-cache", str(tmp_path / "disk")]
    server = ServerProcess(model, flags)
    server.start()
    try:
        assert "on each of 2 ranks" in server.summary
        first = complete(server).json()["choices"][0]["text"]
        [rank] = rank_processes(server.pid)
        os.kill(rank, signal.SIGKILL)
        answer = complete(server, 1000)
        assert answer.status_code in (500, 503)
        assert f"rank 1 (process {rank}) was ended by SIGKILL" in answer.text
        assert server.wait() == 1
    finally:
        server.kill()

    with ServerProcess(model, flags) as server:
        again = complete(server)
        assert again.json()["choices"][0]["text"] == first
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        metrics = httpx.get(f"{server.url}/metrics", timeout=20.0).text
        assert 'stemma_rank_missing_blocks_total{rank="1"} 0.0' in metrics
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
