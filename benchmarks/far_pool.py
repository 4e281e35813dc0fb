"""A pool that is far away, beside none: what prompts cost that it doesn't hold, and those that it does.

``python -m benchmarks.far_pool`` starts a Redis server on loopback behind a proxy that delays what passes
by 100 ms each way. Engines answer prompts of 256 tokens in turns, in one process: one without a pool, one
with it, and, once the pool holds them, a new one with it.

Goals: cold prompts, from the eleventh on, take <= 1.05 of those without a pool; prompts that it holds are
never slower than computing them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from stemma import LLM, SamplingParams

NUM_TOKENS = 256
LEFT_WITHIN = 10
"""Prompts after which a pool that doesn't pay is left alone."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Write what is read, each piece so much later; pieces don't wait for each other."""
    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def write() -> None:
        while True:
            at, data = await due.get()
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            if not data:
                writer.close()
                return
            writer.write(data)

    writing = asyncio.create_task(write())
    while data := await reader.read(1 << 16):
        due.put_nowait((time.monotonic() + delay_s, data))
    due.put_nowait((0.0, b""))
    await writing


@contextmanager
def delayed(port: int, delay_s: float) -> Iterator[int]:
    """Give the port of a proxy before `port`, which delays by so much in each direction."""
    loop, begun = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours, theirs = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            _pass_on(reader, theirs, delay_s), _pass_on(ours, writer, delay_s), return_exceptions=True
        )

    async def serve() -> None:
        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        begun.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True).start()
    begun.wait()
    yield ports[0]


@contextmanager
def redis() -> Iterator[int]:
    """Give the port of a Redis server."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    assert binary is not None, "needs redis-server"
    port = free_port()
    command = [binary, "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        yield port
    finally:
        process.kill()
        process.wait()


def seconds(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Return how long a prompt takes up to its first token, and how many of its tokens were cached."""
    begun = time.perf_counter()
    [result] = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0))
    return time.perf_counter() - begun, result.cache.num_cached_tokens


def main() -> None:
    """Measure, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--delay-ms", type=float, default=100.0, help="Each way.")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, 20_000, NUM_TOKENS).tolist() for _ in range(given.prompts)]
    with (
        redis() as port,
        delayed(port, given.delay_ms / 1000) as far,
        tempfile.TemporaryDirectory() as folder,
    ):
        config = Path(folder) / "redis.json"
        config.write_text(json.dumps({"url": f"redis://127.0.0.1:{far}/0"}))
        alone = LLM(given.model, kv_cache_memory="1GB")
        near = LLM(given.model, kv_cache_memory="1GB", pool="redis", pool_config=config)
        cold = [(seconds(alone, prompt)[0], seconds(near, prompt)[0]) for prompt in prompts]
        near.close()
        again = LLM(given.model, kv_cache_memory="1GB", pool="redis", pool_config=config)
        alone.close()
        fresh = LLM(given.model, kv_cache_memory="1GB")
        held = [(seconds(fresh, prompt)[0], *seconds(again, prompt)) for prompt in prompts]
        fresh.close()
        again.close()
    for name, some in (("the first ten", cold[:LEFT_WITHIN]), ("the others", cold[LEFT_WITHIN:])):
        ratio = statistics.median(b for _, b in some) / statistics.median(a for a, _ in some)
        print(f"cold, {name}: {ratio:.3f} x without a pool (goal of the others <= 1.05)")
    for name, rows in (("the first ten", held[:LEFT_WITHIN]), ("the others", held[LEFT_WITHIN:])):
        ratio = statistics.median(b for _, b, _ in rows) / statistics.median(a for a, _, _ in rows)
        cached = sum(count for _, _, count in rows) / (NUM_TOKENS * len(rows))
        print(f"held by the pool, {name}: {ratio:.3f} x computing (goal <= 1.0), {cached:.0%} loaded")


if __name__ == "__main__":
    main()
