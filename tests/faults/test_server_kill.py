"""kill -9 of servers and engines in the middle of serving and writing; what they left is never wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from stemma.cli.server_process import ServerProcess
from stemma.model.files.tiny import write_tiny_model

PROMPTS = [f"Number {n}. " + "The quick brown fox jumps over the lazy dog. " * 4 for n in range(8)]
FLAGS = ("--block-size", "16", "--kv-cache-memory", "300kB", "--num-threads", "1", "--load-when", "always")


def complete(url: str, prompt: str) -> tuple[str, int]:
    """Return text and cached tokens of a greedy answer."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).raise_for_status().json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def flood(url: str, stop: threading.Event) -> None:
    """Keep the server busy until it dies."""
    number = 0
    while not stop.is_set():
        number += 1
        try:
            complete(url, f"{number} " + PROMPTS[number % len(PROMPTS)])
        except httpx.HTTPError:
            return


@pytest.mark.slow
def test_kill_9_of_a_busy_server(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", hidden_size=96, num_layers=2)
    with ServerProcess(model, [*FLAGS, "--no-enable-prefix-cache"]) as plain:
        expected = [complete(plain.url, prompt)[0] for prompt in PROMPTS]
    tiers = ["--disk-cache", str(tmp_path / "cache"), "--disk-cache-size", "3MB", "--host-cache", "1MB"]
    num_cached = 0
    for round_number in range(4):
        with ServerProcess(model, [*FLAGS, *tiers]) as server:
            answers = [complete(server.url, prompt) for prompt in PROMPTS]
            assert [text for text, _ in answers] == expected
            num_cached += sum(cached for _, cached in answers) if round_number else 0
            stop = threading.Event()
            clients = [threading.Thread(target=flood, args=(server.url, stop)) for _ in range(3)]
            for client in clients:
                client.start()
            stop.wait(0.3 + 0.2 * round_number)
            server.kill()
            stop.set()
            for client in clients:
                client.join()
    assert num_cached > 0


@pytest.mark.slow
def test_kill_9_of_50_engines(tmp_path: Path) -> None:
    """Each answers as the cache-off run does, from what the killed one before it left."""
    model = write_tiny_model(tmp_path / "tiny", hidden_size=96, num_layers=2)
    repository = Path(__file__).parents[2]
    path = os.pathsep.join([str(repository / "src"), str(repository)])
    command = [sys.executable, "-m", "tests.faults.engine_rounds", str(model), str(tmp_path / "cache"), "50"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=repository,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plain, *rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == 50
    assert [one["texts"] for one in rounds] == [plain["texts"]] * 50
    assert sum(one["disk"] > 0 for one in rounds) > 25
    reasons = {reason for one in rounds for reason in one["faults"]}
    assert reasons <= {"checksum", "being_written"}
