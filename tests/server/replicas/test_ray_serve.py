"""Replicas on a real Ray: routing by KV events, a killed replica, a rolling restart with warm disks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.model.tiny import write_tiny_model
from tests.memory.tiers.pool.servers import free_port

pytest.importorskip("ray", reason="the extra `ray` isn't installed")
pytest.importorskip("zmq", reason="the extra `ray` isn't installed")
pytestmark = pytest.mark.slow

READY_S = 240.0
PROMPTS = [f"{number} {'The river carries water from the mountains to the sea. ' * 6}" for number in range(8)]
KEY = {"authorization": "Bearer s3cret"}


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


class Cluster:
    """`stemma cluster deploy`, as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.model = write_tiny_model(folder / "model", hidden_size=96, num_layers=2)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        file = folder / "cluster.yaml"
        file.write_text(
            json.dumps(  # JSON is YAML
                {
                    "settings": {
                        "model": {"path": str(self.model), "num_threads": 1},
                        "cache": {"kv_cache_memory": "8MB", "block_size": 16},
                        "tiers": {"disk_cache": str(folder / "disk"), "load_when": "always"},
                        "server": {"port": self.port, "admin_key": "s3cret"},
                    },
                    "replicas": {"count": 2},
                }
            )
        )
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stemma", "cluster", "deploy", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def wait_until(self, word: str) -> None:
        wait_for(
            lambda: any(word in line for line in self.lines) or self.process.poll() is not None,
            timeout_s=READY_S,
        )
        assert self.process.poll() is None, "".join(self.lines)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/health", headers=KEY, timeout=30).json()

    def replicas(self) -> dict[str, dict[str, Any]]:
        return self.health().get("replicas", {})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.wait_until("Ready:")
        yield cluster
    finally:
        assert cluster.stop() == 0, "".join(cluster.lines)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> dict[str, str]:
    """What one engine alone answers."""
    llm = LLM(cluster.model, kv_cache_memory="8MB", num_threads=1)
    try:
        answers = llm.generate(PROMPTS, SamplingParams(max_tokens=300, temperature=0.0))
        return {prompt: answer.text for prompt, answer in zip(PROMPTS, answers, strict=True)}
    finally:
        llm.close()


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prompts_go_where_their_blocks_are(cluster: Cluster, expected: dict[str, str]) -> None:
    for prompt in PROMPTS:
        answer = cluster.complete(prompt)
        assert expected[prompt].startswith(answer.json()["choices"][0]["text"])
    held_by = {replica["tokens_to_compute"] for replica in cluster.replicas().values()}
    assert held_by == {0}
    wait_for(lambda: cluster.health()["num_known_blocks"] > 0)
    assert all(cached(cluster.complete(prompt + " And then?")) > 64 for prompt in PROMPTS)
    assert cluster.complete(5).status_code == 400  # type: ignore[arg-type]
    assert httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"] == "model"
    assert httpx.get(f"{cluster.url}/admin/stats").status_code == 400


def test_a_stream_comes_whole(cluster: Cluster, expected: dict[str, str]) -> None:
    answer = cluster.complete(PROMPTS[0], stream=True, max_tokens=32)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data:")]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text
    assert expected[PROMPTS[0]].startswith(text)


def test_a_killed_replica_is_replaced_and_the_new_one_is_warm(
    cluster: Cluster, expected: dict[str, str]
) -> None:
    before = cluster.replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(cluster.complete, prompt, max_tokens=300) for prompt in PROMPTS]
        wait_for(lambda: any(replica["requests"] for replica in cluster.replicas().values()))
        victim = max(cluster.replicas().values(), key=lambda replica: replica["requests"])
        os.kill(victim["pid"], signal.SIGKILL)
        answers = [one.result() for one in running]
    assert {answer.status_code for answer in answers} == {200}
    assert [answer.json()["choices"][0]["text"] for answer in answers] == list(expected.values())
    assert cluster.health()["num_retries"] > 0
    wait_for(lambda: len(cluster.replicas()) == 2, timeout_s=READY_S)
    [new] = [one for name, one in cluster.replicas().items() if name not in before]
    assert new["disk"] == victim["disk"]
    tiers = [
        cluster.complete(prompt).json()["usage"]["stemma"]["cached_tokens_by_tier"] for prompt in PROMPTS
    ]
    assert all(sum(one.values()) > 64 for one in tiers)
    assert any(one.get("disk") for one in tiers)


def test_a_rolling_restart_is_warm_and_loses_nothing(cluster: Cluster, expected: dict[str, str]) -> None:
    before = cluster.replicas()
    stop = threading.Event()
    wrong: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            answer = cluster.complete(PROMPTS[0])
            if answer.status_code != 200 or not expected[PROMPTS[0]].startswith(
                answer.json()["choices"][0]["text"]
            ):
                wrong.append(answer.text)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        cluster.process.send_signal(signal.SIGHUP)
        cluster.wait_until("Replaced.")
    finally:
        stop.set()
        asking.join()
    assert wrong == []
    wait_for(lambda: len(cluster.replicas()) == 2, timeout_s=READY_S)
    after = cluster.replicas()
    assert not {one["pid"] for one in after.values()} & {one["pid"] for one in before.values()}
    assert {one["disk"] for one in after.values()} == {one["disk"] for one in before.values()}
    assert all(cached(cluster.complete(prompt)) > 64 for prompt in PROMPTS)
