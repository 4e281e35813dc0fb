"""Soak of a cluster: three replicas under traffic, one of which is killed every minute.

Every answer is compared with the one that a single engine gave before (greedy); half of them are streams. A
stream may break off with an error, but what came must be the beginning of the right answer, from one
completion. Exit status 1 for a wrong answer, a stream from two completions, or a request that isn't counted.
`--minutes N`; `--ray`: replicas on Ray Serve, otherwise `stemma route` in front of three `stemma serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import httpx

from stemma.cli.ready_line import READY
from stemma.cli.server_process import ServerProcess
from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.model.files.tiny import write_tiny_model

NUM_REPLICAS = 3
NUM_CLIENTS = 6
NUM_PROMPTS = 80
MAX_TOKENS = 150
KILL_EVERY_S = 60.0
PAUSE_S = 0.3
"""Mean time between an answer and the client's next request."""
KEY = "soak"
SENTENCES = (
    "A river that runs through the valley carries water from the mountains to the sea. ",
    "Every morning she walks along the same path, past the old mill and over the bridge. ",
    "There are seven days in a week, twelve months in a year and sixty minutes in an hour. ",
    "He bought three apples for two coins each and sold them for four coins each. ",
)


class Cluster(Protocol):
    """Three replicas behind one address."""

    url: str

    async def kill_one(self, number: int) -> None:
        """Kill a replica, and start it again if nobody else does."""

    def stop(self) -> None:
        """End everything."""


class RayCluster:
    """`stemma cluster deploy`; Ray Serve replaces what was killed."""

    def __init__(self, model: Path, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        file = folder / "cluster.yaml"
        settings = {
            "model": {"path": str(model), "num_threads": 1},
            "cache": {"kv_cache_memory": "2MB", "block_size": 16},
            "tiers": {"disk_cache": str(folder / "disk"), "disk_cache_size": "64MB"},
            "server": {"port": port, "admin_key": KEY},
        }
        # One ingress: each counts its own, and the counts are compared below.
        file.write_text(
            json.dumps({"settings": settings, "replicas": {"count": NUM_REPLICAS, "num_ingress": 1}})
        )
        command = [sys.executable, "-m", "stemma", "cluster", "deploy", str(file)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        if not any(line.startswith(READY) for line in self._process.stdout):
            raise SystemExit("the cluster did not start")

    async def kill_one(self, number: int) -> None:
        """Kill one of the replicas that run; Ray starts another."""
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
            replicas = (await client.get(f"{self.url}/health")).json().get("replicas", {})
        if replicas:
            pid = sorted(replica["pid"] for replica in replicas.values())[number % len(replicas)]
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End application and Ray."""
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(90)


class ProxiedServers:
    """`stemma route` in front of `stemma serve`, with KV events; a killed server is started again."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._servers = []
        route = [sys.executable, "-m", "stemma", "route", "--port", "0", "--tokenizer", str(model)]
        for number in range(NUM_REPLICAS):
            port, events, replay = free_port(), free_port(), free_port()
            flags = {
                "port": port,
                "kv-events": f"tcp://127.0.0.1:{events}",
                "kv-events-replay": f"tcp://127.0.0.1:{replay}",
                "kv-cache-memory": "2MB",
                "block-size": 16,
                "num-threads": 1,
                "disk-cache": folder / f"disk-{number}",
                "disk-cache-size": "64MB",
                "served-name": "model",
            }
            words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
            self._servers.append(ServerProcess(model, words))
            events_of = f"events=tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"
            route += ["--server", f"http://127.0.0.1:{port},{events_of}"]
        for server in self._servers:
            server.start()
        self._proxy = subprocess.Popen(
            route,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "STEMMA_ADMIN_KEY": KEY},
        )
        assert self._proxy.stdout is not None
        ready = next(line for line in self._proxy.stdout if line.startswith(READY))
        self.url = ready.removeprefix(READY).split()[0]

    async def kill_one(self, number: int) -> None:
        """Kill a server and start it again."""
        server = self._servers[number % NUM_REPLICAS]
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

    def stop(self) -> None:
        """End proxy and servers."""
        self._proxy.terminate()
        self._proxy.wait(30)
        for server in self._servers:
            with suppress(Exception):
                server.stop()


class Clients:
    """Traffic, and what became of it: `broken` is a failure after the first event, `lost` one before it."""

    def __init__(self, urls: Sequence[str], expected: dict[str, str], seed: int) -> None:
        """`urls`: each request goes to one of them."""
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.latencies_s: list[float] = []
        self.num_cached = self.num_prompt = 0
        self.is_over = False
        self.urls = urls
        self._expected = expected
        self._seed = seed

    @property
    def num_lost(self) -> int:
        """Requests that failed before their first event."""
        return sum(count for outcome, count in self.counts.items() if outcome.startswith("lost"))

    @property
    def num_uncounted(self) -> int:
        """Requests that were sent and have no outcome."""
        return 2 * self.counts["sent"] - self.counts.total()

    async def run(self, number: int) -> None:
        """One client, until it is over."""
        rng = random.Random(self._seed + number)
        prompts = list(self._expected)
        async with httpx.AsyncClient(timeout=180) as client:
            while not self.is_over:
                prompt, is_stream = rng.choice(prompts), rng.random() < 0.5
                url = rng.choice(self.urls)
                self.counts["sent"] += 1
                start = time.perf_counter()
                try:
                    outcome = await (self._stream if is_stream else self._whole)(client, url, prompt)
                except httpx.HTTPError as error:
                    outcome = f"lost: {type(error).__name__}"
                self.latencies_s.append(time.perf_counter() - start)
                self.counts[outcome] += 1
                await asyncio.sleep(rng.expovariate(1 / PAUSE_S))

    def _body(self, prompt: str, **fields: Any) -> dict[str, Any]:
        return {"model": "model", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, **fields}

    async def _whole(self, client: httpx.AsyncClient, url: str, prompt: str) -> str:
        answer = await client.post(f"{url}/v1/completions", json=self._body(prompt))
        if answer.status_code != 200:
            return f"lost: status {answer.status_code}"
        said = answer.json()
        self.num_prompt += said["usage"]["prompt_tokens"]
        self.num_cached += said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return self._judge(prompt, said["choices"][0]["text"], is_whole=True)

    async def _stream(self, client: httpx.AsyncClient, url: str, prompt: str) -> str:
        text, names, ends, failure = "", set(), 0, ""
        body = self._body(prompt, stream=True)
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    return f"lost: status {answer.status_code}"
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        ends += 1
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            failure = str(event["error"].get("code"))
                            continue
                        names.add(event["id"])
                        text += "".join(choice["text"] for choice in event["choices"])
        except httpx.HTTPError as error:
            failure = type(error).__name__
        if len(names) > 1 or ends > 1:
            self.wrong.append(f"{prompt[:20]!r}: a stream of {len(names)} completions, {ends} ends")
            return "DUPLICATED"
        if not failure and not ends:
            failure = "a stream without end or error"
        if failure:
            failure = f"{'broken' if names else 'lost'}: {failure}"
        return self._judge(prompt, text, is_whole=not failure, failure=failure)

    def _judge(self, prompt: str, text: str, *, is_whole: bool, failure: str = "") -> str:
        expected = self._expected[prompt]
        if text == expected or (not is_whole and expected.startswith(text)):
            return failure or "right"
        self.wrong.append(f"{prompt[:20]!r}: {text!r} instead of {expected!r}")
        return "WRONG"


def prompts_of(rng: random.Random) -> list[str]:
    """Return prompts of which some begin alike."""
    begins = ["".join(rng.choices(SENTENCES, k=8)) for _ in range(NUM_PROMPTS // 8)]
    return [
        f"{begins[number % len(begins)]}{number} {rng.choice(SENTENCES)}" for number in range(NUM_PROMPTS)
    ]


def reference(model: Path, prompts: Sequence[str]) -> dict[str, str]:
    """Return what one engine alone answers."""
    llm = LLM(model, kv_cache_memory="32MB", num_threads=1)
    try:
        answers = llm.generate(list(prompts), SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
        return {prompt: answer.text for prompt, answer in zip(prompts, answers, strict=True)}
    finally:
        llm.close()


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def soak(cluster: Cluster, clients: Clients, seconds: float) -> int:
    """Send and kill for so long; return the number of kills."""
    tasks = [asyncio.create_task(clients.run(number)) for number in range(NUM_CLIENTS)]
    kills: list[asyncio.Task[None]] = []
    start = time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        await asyncio.sleep(min(KILL_EVERY_S / 2 if not kills else KILL_EVERY_S, seconds - passed))
        print(f"{time.monotonic() - start:6.0f} s  {len(kills)} kills  {dict(clients.counts)}", flush=True)
        if time.monotonic() - start < seconds - 5.0:
            kills.append(asyncio.create_task(cluster.kill_one(len(kills))))
    clients.is_over = True
    await asyncio.gather(*tasks, *kills)
    return len(kills)


async def told_by(url: str) -> dict[str, Any]:
    """Return the proxy's own counters."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        health: dict[str, Any] = (await client.get(f"{url}/health")).json()
        return {name: value for name, value in health.items() if name.startswith("num_")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", hidden_size=96, num_layers=2)
        expected = reference(model, prompts_of(random.Random(given.seed)))
        cluster: Cluster = (RayCluster if given.ray else ProxiedServers)(model, folder)
        try:
            clients = Clients([cluster.url], expected, given.seed)
            num_kills = asyncio.run(soak(cluster, clients, 60.0 * given.minutes))
            told = asyncio.run(told_by(cluster.url))
        finally:
            cluster.stop()
    counts = clients.counts
    slowest = sorted(clients.latencies_s)
    print(f"{'Ray Serve' if given.ray else 'stemma route'}: {num_kills} kills; {dict(counts)}; proxy: {told}")
    print(f"cached {clients.num_cached / max(1, clients.num_prompt):.3f} of the whole answers' prompt tokens")
    print(f"latency p50 {slowest[len(slowest) // 2]:.3f} s, p99 {slowest[len(slowest) * 99 // 100]:.3f} s")
    for line in clients.wrong[:20]:
        print(line)
    bad = (counts["WRONG"], counts["DUPLICATED"], clients.num_uncounted)
    print("{} wrong, {} duplicated, {} uncounted".format(*bad))
    sys.exit(1 if any(bad) else 0)


if __name__ == "__main__":
    main()
