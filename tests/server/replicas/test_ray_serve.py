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
from contextlib import contextmanager
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

    def __init__(self, folder: Path, replicas: dict[str, Any]) -> None:
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
                    "replicas": replicas,
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
    with serving(Cluster(tmp_path_factory.mktemp("cluster"), {"count": 2})) as cluster:
        yield cluster


@contextmanager
def serving(cluster: Cluster) -> Iterator[Cluster]:
    try:
        cluster.wait_until("Ready:")
        yield cluster
    finally:
        assert cluster.stop() == 0, "".join(cluster.lines)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> dict[str, str]:
    return answers_of_one_engine(cluster.model)


def answers_of_one_engine(model: Path) -> dict[str, str]:
    llm = LLM(model, kv_cache_memory="8MB", num_threads=1)
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


class Load:
    """Clients that ask without a pause, each answer compared with what one engine says."""

    def __init__(self, cluster: Cluster, expected: dict[str, str], num_clients: int, max_tokens: int) -> None:
        self.wrong: list[str] = []
        self.num_right = 0
        self._stop = threading.Event()

        def ask(number: int) -> None:
            turn = number
            while not self._stop.is_set():
                prompt = PROMPTS[turn % len(PROMPTS)]
                turn += 1
                answer = cluster.complete(prompt, max_tokens=max_tokens)
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else None
                if text and expected[prompt].startswith(text):
                    self.num_right += 1
                else:
                    self.wrong.append(answer.text)

        self._threads = [threading.Thread(target=ask, args=[number]) for number in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_replicas_follow_the_load_and_lose_no_request(tmp_path: Path) -> None:
    """One at first, three under load, one again; somebody asks all the time."""
    autoscaling = {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 2.0,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 4.0,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2.0,
    }
    with serving(Cluster(tmp_path, {"autoscaling": autoscaling})) as cluster:
        expected = answers_of_one_engine(cluster.model)
        steady = Load(cluster, expected, num_clients=1, max_tokens=8)
        wait_for(lambda: len(cluster.replicas()) == 1)  # the ingress knows them once it was asked
        heavy = Load(cluster, expected, num_clients=12, max_tokens=300)
        try:
            wait_for(lambda: len(cluster.replicas()) == 3, timeout_s=READY_S)
            pids = {replica["pid"] for replica in cluster.replicas().values()}
            num_before = heavy.num_right
            wait_for(lambda: heavy.num_right > num_before + 24, timeout_s=READY_S)
            heavy.stop()
            wait_for(lambda: len(cluster.replicas()) == 1, timeout_s=READY_S)
            [last] = cluster.replicas().values()
            num_before = steady.num_right
            wait_for(lambda: steady.num_right > num_before + 8, timeout_s=READY_S)
        finally:
            heavy.stop()
            steady.stop()
        assert heavy.wrong == steady.wrong == []
        assert last["pid"] in pids
