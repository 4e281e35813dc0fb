"""The engine above real pools whose servers die: every answer equals the cache-off run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.harness import Harness
from tests.engine.operator.pool_rounds import PROMPTS, Expected, expected, from_pool, pool, round_of
from tests.engine.operator.pool_rounds import serve as serve_directory
from tests.memory.tiers.pool.servers import MooncakeMaster, RedisServer

from stemma.memory.tiers.pool.breaker import Circuit

__all__ = ["expected", "serve_directory"]  # fixtures

HOLDER = """
import json, sys
from stemma.memory.tiers.pool.registry import open_pool_backend
pool = open_pool_backend("mooncake", json.loads(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.05)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "pool.json"


@pytest.fixture
def redis_server(tmp_path: Path, config: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    config.write_text(json.dumps({"url": server.url}))
    yield server
    server.stop()


@pytest.fixture
def master(config: Path) -> Iterator[MooncakeMaster]:
    master = MooncakeMaster(client_ttl_s=3)
    config.write_text(json.dumps(master.config()))
    yield master
    master.stop()


def closed(one: Harness) -> bool:
    return pool(one).status().circuit is Circuit.CLOSED


def test_redis_is_stopped_and_comes_back(
    redis_server: RedisServer, serve_directory: Callable[..., Harness], expected: Expected
) -> None:
    one = serve_directory(pool="redis")
    round_of(one, expected)
    assert from_pool(round_of(one, expected)) == [96] * 4
    redis_server.stop()
    round_of(one, expected)
    assert pool(one).counters.reasons["unreachable"] > 0
    redis_server.start()
    until(lambda: closed(one))
    round_of(one, expected)
    round_of(one, expected)
    assert from_pool(round_of(serve_directory(pool="redis"), expected)) == [96] * 4


SLOW_S = 5.0


def test_redis_answers_after_five_seconds(
    redis_server: RedisServer, serve_directory: Callable[..., Harness], expected: Expected
) -> None:
    one = serve_directory(pool="redis", pool_deadline_s=0.3)
    round_of(one, expected)
    redis_server.pause(SLOW_S)
    start = time.monotonic()
    assert from_pool(round_of(one, expected)) == [0] * 4
    assert time.monotonic() - start < SLOW_S
    assert pool(one).counters.reasons["late"] > 0
    assert not closed(one)
    until(lambda: closed(one))
    assert from_pool(round_of(one, expected)) == [96] * 4


def test_redis_returns_garbage(
    redis_server: RedisServer, serve_directory: Callable[..., Harness], expected: Expected
) -> None:
    redis = pytest.importorskip("redis")
    one = serve_directory(pool="redis")
    round_of(one, expected)
    with redis.Redis(port=redis_server.port) as client:
        for number, key in enumerate(client.scan_iter()):
            whole = client.get(key)
            garbage = {
                0: os.urandom(len(whole)),
                1: whole[:-100],
                2: whole[:70] + bytes([whole[70] ^ 1]) + whole[71:],
            }
            client.set(key, garbage[number % 3])
    assert from_pool(round_of(one, expected)) == [0] * 4
    reasons = pool(one).counters.reasons
    assert reasons["bad_header"] + reasons["checksum"] + reasons["wrong_length"] > 0
    until(lambda: from_pool(round_of(one, expected)) == [96] * 4)


@pytest.mark.slow
def test_the_mooncake_master_answers_after_five_seconds(
    master: MooncakeMaster, serve_directory: Callable[..., Harness], expected: Expected
) -> None:
    one = serve_directory(pool="mooncake", pool_deadline_s=0.5)
    round_of(one, expected)
    master.pause()
    try:
        start = time.monotonic()
        round_of(one, expected)
        round_of(one, expected)
        assert not closed(one)
        assert pool(one).counters.reasons["late"] > 0
        time.sleep(max(0.0, start + SLOW_S - time.monotonic()))
    finally:
        master.go_on()
    until(lambda: closed(one))
    until(lambda: from_pool(round_of(one, expected)) == [96] * 4)


def test_the_mooncake_master_is_killed_and_comes_back(
    master: MooncakeMaster, serve_directory: Callable[..., Harness], expected: Expected
) -> None:
    one = serve_directory(pool="mooncake", pool_deadline_s=0.5)
    round_of(one, expected)
    assert from_pool(round_of(one, expected)) == [96] * 4
    master.stop()
    until(lambda: bool(round_of(one, expected)) and not closed(one))
    reasons = pool(one).counters.reasons
    assert reasons["late"] + reasons["unreachable"] > 0
    master.start()
    until(lambda: closed(one))
    # DRAM objects are forgotten with the master. Lost blocks are noticed, computed, and put again.
    until(lambda: from_pool(round_of(one, expected)) == [96] * 4)


def test_the_process_that_holds_the_blocks_is_killed(
    master: MooncakeMaster, serve_directory: Callable[..., Harness], expected: Expected, config: Path
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, json.dumps(master.config())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        config.write_text(json.dumps(master.config(0)))
        one = serve_directory(pool="mooncake", pool_deadline_s=3.0)
        round_of(one, expected)
        assert from_pool(round_of(one, expected)) == [96] * 4
        holder.kill()
        holder.wait()
        # The master names the blocks for some seconds more, but nobody has them.
        assert from_pool(round_of(one, expected)) == [0] * len(PROMPTS)
        assert pool(one).counters.reasons["read_failed"] > 0
    finally:
        holder.kill()
        holder.wait()
