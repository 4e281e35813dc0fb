"""A router that is killed and started anew knows by snapshots what the servers hold, within five seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from packages.router.tests.routing.processes import Process, health, router
from tests.ports import free_port

from stemma.cli.server_process import ServerProcess
from stemma.model.files.tiny import write_tiny_model

pytest.importorskip("zmq", reason="the extra `events` isn't installed")
BLOCK_SIZE = 16
PROMPTS = [f"Number {number} begins here. " + "The river carries water. " * 20 for number in range(30)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[tuple[str, str]]]]:
    """Yield the model, and two servers: URL, and how a router is told of it."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=1)
    started, told = [], []
    try:
        for _ in range(2):
            events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            flags = ["--kv-events", events, "--kv-events-replay", replay, "--served-name", "model"]
            flags += ["--kv-cache-memory", "8MB", "--block-size", str(BLOCK_SIZE), "--num-threads", "1"]
            started.append(ServerProcess(model, flags))
            started[-1].start()
            told.append((started[-1].url, f"{started[-1].url},events={events},replay={replay}"))
        yield model, told
    finally:
        for server in started:
            server.kill()


def hit_ratio(url: str, prompts: list[str]) -> float:
    """Ask for each prompt; return the share of prompt tokens that was cached."""
    cached = total = 0
    with httpx.Client(timeout=60) as client:
        for prompt in prompts:
            body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            usage = client.post(f"{url}/v1/completions", json=body).json()["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            total += usage["prompt_tokens"]
    return cached / total


def known(front: Process) -> int:
    blocks = health(front)["num_known_blocks"]
    assert isinstance(blocks, int)
    return blocks


@pytest.mark.slow
def test_a_restarted_router_finds_the_hits_again(servers: tuple[Path, list[tuple[str, str]]]) -> None:
    """Every other prompt lies on the server that its hash doesn't name: only what servers tell finds it."""
    model, told = servers
    for place, (url, _) in enumerate(told):
        assert hit_ratio(url, PROMPTS[place::2]) < 0.3
    flags = ("--tokenizer", str(model))
    front = router(*(one for _, one in told), flags=flags)
    try:
        deadline = time.monotonic() + 5
        while known(front) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        before = hit_ratio(front.url, PROMPTS)
        num_known = known(front)
    finally:
        front.stop()
    front = router(*(one for _, one in told), flags=flags)
    try:
        deadline = time.monotonic() + 5
        while known(front) < num_known and time.monotonic() < deadline:
            time.sleep(0.05)
        after = hit_ratio(front.url, PROMPTS)
    finally:
        front.stop()
    assert before > 0.9
    assert after > before - 0.01
    assert num_known > len(PROMPTS) * 3
