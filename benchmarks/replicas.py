"""Routers of replicas on a real Ray Serve: hits and first tokens, beside one replica with all memory.

Conversations with shared beginnings, from a few clients at once; the same requests for every router. Replicas
are tiny models with one thread each. `--routers`, `--replicas N`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from stemma.config.loading import load_settings
from stemma.model.files.tiny import write_tiny_model
from stemma_router.cluster_file import ClusterFile, RaySettings, Replicas
from stemma_router.replicas import keep_ray_local

ROUTERS = (
    "cache-aware",
    "rendezvous",
    "least-loaded",
    "power-of-two",
    "round-robin",
    "prefix-affinity (Ray's)",
)
REPLICA_BYTES = 8_000_000
NUM_CLIENTS = 8
NUM_CONVERSATIONS = 48
NUM_TURNS = 6
THINK_S = 0.4
WORDS = ("the", "river", "water", "sea", "every", "morning", "she", "walks", "along", "path", "old", "mill")


@dataclass(slots=True)
class Outcome:
    """What one router gave."""

    first_token_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0
    num_failed: int = 0

    def line(self, name: str) -> str:
        """Return the row."""
        times = sorted(self.first_token_s)
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        hits = self.num_cached / max(1, self.num_prompt)
        return (
            f"{name:28} hits {hits:.4f}  first token p50 {1000 * p50:6.0f} ms  p99 {1000 * p99:6.0f} ms  "
            f"{len(times)} requests, {self.num_failed} failed"
        )


def sentence(rng: random.Random, num_words: int) -> str:
    """Return a text of words."""
    return " ".join(rng.choice(WORDS) for _ in range(num_words)) + ". "


async def converse(url: str, outcome: Outcome, seed: int) -> None:
    """Hold all conversations, a few at a time; each turn repeats what came before."""
    rng = random.Random(seed)
    heads = [sentence(rng, 180) for _ in range(6)]
    said = [heads[number % len(heads)] + sentence(rng, 20) for number in range(NUM_CONVERSATIONS)]
    turns = [number for number in range(NUM_CONVERSATIONS) for _ in range(NUM_TURNS)]
    rng.shuffle(turns)
    pauses = [rng.expovariate(1 / THINK_S) for _ in turns]
    further = [sentence(rng, 30) for _ in turns]
    queue = iter(range(len(turns)))

    async def client() -> None:
        async with httpx.AsyncClient(timeout=120) as http:
            for turn in queue:
                number = turns[turn]
                said[number] += further[turn]
                await ask(http, url, said[number], outcome)
                await asyncio.sleep(pauses[turn])

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))


async def ask(http: httpx.AsyncClient, url: str, prompt: str, outcome: Outcome) -> None:
    """Send one request and note what came."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    start, first = time.perf_counter(), 0.0
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                usage = json.loads(line.removeprefix("data: ")).get("usage")
                if usage:
                    outcome.num_prompt += usage["prompt_tokens"]
                    outcome.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
    outcome.num_failed += answer.status_code != 200 or not first
    outcome.first_token_s.append(first)


def cluster_of(model: Path, port: int, num_replicas: int, memory: int, router: str) -> ClusterFile:
    """Return the cluster with one router of ours, or of Ray's if it isn't known."""
    tables: dict[str, Any] = {
        "model": {"path": model, "num_threads": 1},
        "cache": {"kv_cache_memory": memory, "block_size": 16, "eviction": "lru"},
        "speculation": {"mode": "off"},
        "server": {"port": port},
    }
    ours: Any = router if router in ROUTERS[:-1] else "power-of-two"
    replicas = Replicas(
        count=num_replicas, router=ours, num_ingress=1, ray=RaySettings(graceful_shutdown_s=5.0)
    )
    return ClusterFile(settings=load_settings(tables=tables), replicas=replicas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--routers", nargs="*", default=ROUTERS)
    parser.add_argument("--replicas", type=int, default=4)
    given = parser.parse_args()
    keep_ray_local()
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from stemma_router.replicas import application

    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        listener.close()
        model = write_tiny_model(Path(name) / "model", hidden_size=192, num_layers=4)
        runs = [("one replica, all memory", 1, given.replicas * REPLICA_BYTES)]
        runs += [(router, given.replicas, REPLICA_BYTES) for router in given.routers]
        application.start_ray(Replicas(count=1))
        try:
            for router, count, memory in runs:
                config = None
                if router == ROUTERS[-1]:
                    path = "benchmarks.serve_affinity.Affinity"
                    config = RequestRouterConfig(request_router_class=path)
                application.deploy(cluster_of(model, port, count, memory, router), config)
                outcome = Outcome()
                asyncio.run(converse(f"http://127.0.0.1:{port}", outcome, seed=0))
                print(outcome.line(router), flush=True)
                serve.delete(application.NAME)
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
