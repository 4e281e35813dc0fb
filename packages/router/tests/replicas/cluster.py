"""`stemma cluster deploy` as a process, and clients that compare each answer with one engine's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from tests.memory.tiers.pool.servers import free_port

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.model.files.tiny import write_tiny_model

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


@contextmanager
def serving(cluster: Cluster) -> Iterator[Cluster]:
    try:
        cluster.wait_until("Ready:")
        yield cluster
    finally:
        assert cluster.stop() == 0, "".join(cluster.lines)


def answers_of_one_engine(model: Path) -> dict[str, str]:
    llm = LLM(model, kv_cache_memory="8MB", num_threads=1)
    try:
        answers = llm.generate(PROMPTS, SamplingParams(max_tokens=300, temperature=0.0))
        return {prompt: answer.text for prompt, answer in zip(PROMPTS, answers, strict=True)}
    finally:
        llm.close()


class Load:
    """Clients that ask without a pause, each answer compared with what one engine says."""

    def __init__(self, cluster: Cluster, expected: dict[str, str], num_clients: int, max_tokens: int) -> None:
        self.wrong: list[str] = []
        self.lost: list[str] = []
        """Errors, and connections that broke."""
        self.right_at: list[float] = []
        """When right answers came, by `time.monotonic`."""
        self._stop = threading.Event()

        def ask(number: int) -> None:
            turn = number
            while not self._stop.is_set():
                prompt = PROMPTS[turn % len(PROMPTS)]
                turn += 1
                try:
                    answer = cluster.complete(prompt, max_tokens=max_tokens)
                except httpx.HTTPError as error:
                    self.lost.append(repr(error))
                    continue
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else None
                if text and expected[prompt].startswith(text):
                    self.right_at.append(time.monotonic())
                else:
                    (self.wrong if text else self.lost).append(answer.text)

        self._threads = [threading.Thread(target=ask, args=[number]) for number in range(num_clients)]
        for thread in self._threads:
            thread.start()

    @property
    def num_right(self) -> int:
        """Right answers until now."""
        return len(self.right_at)

    def longest_gap_s(self, since: float) -> float:
        """Return the longest time without a right answer."""
        times = [since, *(one for one in sorted(self.right_at) if one > since), time.monotonic()]
        return max(after - before for before, after in pairwise(times))

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
