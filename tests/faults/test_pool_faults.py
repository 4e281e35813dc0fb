"""Real pools that die under the pool tier: every block becomes a counted miss, and the tier recovers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stemma.config.settings import PoolSettings
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.pool.breaker import Circuit
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.memory.tiers.pool.registry import open_pool_backend
from tests.contracts.block_store_suite import BLOCK_BYTES, chain, keys, read
from tests.memory.tiers.pool.servers import MooncakeMaster, RedisServer

NAMES = PoolKeys("tiny")

HOLDER = """
import json, sys, time
from stemma.config.settings import PoolSettings
from stemma.memory.tiers.pool.registry import open_pool_backend
from stemma.memory.tiers.pool.pool_store import PoolStore
from tests.contracts.block_store_suite import BLOCK_BYTES, chain
from stemma.memory.tiers.pool.keys import PoolKeys
backend = open_pool_backend("mooncake", json.loads(sys.argv[1]))
settings = PoolSettings(name="mooncake", deadline_s=5)
store = PoolStore(backend, PoolKeys("tiny"), BLOCK_BYTES, settings)
print([str(result) for result in store.put_many(chain("held", 4))], flush=True)
time.sleep(600)
"""


def open_store(name: str, config: dict[str, object], deadline_s: float) -> PoolStore:
    settings = PoolSettings(name=name, deadline_s=deadline_s)
    return PoolStore(open_pool_backend(name, config), NAMES, BLOCK_BYTES, settings)


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.05)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster(client_ttl_s=3)
    yield master
    master.stop()


def test_redis_stopped_and_started(redis_server: RedisServer) -> None:
    store = open_store("redis", {"url": redis_server.url}, 2.0)
    blocks = chain("a", 3)
    store.put_many(blocks)
    redis_server.stop()
    for _ in range(3):
        assert read(store, keys(blocks)) == [ReadResult.ERROR] * 3
    assert store.status().circuit is Circuit.OPEN
    assert store.counters.reasons["unreachable"] == 9
    assert store.put_many(blocks) == [PutResult.ERROR] * 3
    assert store.counters.reasons["circuit_open"] == 3
    redis_server.start()
    until(lambda: store.status().circuit is Circuit.CLOSED)
    assert read(store, keys(blocks)) == [ReadResult.MISS] * 3
    assert store.put_many(blocks) == [PutResult.STORED] * 3
    assert read(store, keys(blocks)) == [ReadResult.HIT] * 3
    store.close()


def test_mooncake_master_killed_and_restarted(master: MooncakeMaster) -> None:
    store = open_store("mooncake", master.config(), 0.3)
    blocks = chain("a", 3)
    assert store.put_many(blocks) == [PutResult.STORED] * 3
    master.stop()
    until(
        lambda: read(store, keys(blocks)) != [ReadResult.HIT] * 3 and not store.exists_many(keys(blocks))[0]
    )
    until(lambda: store.put_many(chain("b", 1)) == [PutResult.ERROR] and store.status().num_opened > 0)
    reasons = store.counters.reasons
    assert reasons["late"] + reasons["unreachable"] > 0
    master.start()
    # The client joins again by itself; what was in DRAM is forgotten, and nothing wrong is ever read.
    until(lambda: store.put_many(chain("c", 3)) in ([PutResult.STORED] * 3, [PutResult.EXISTS] * 3))
    until(lambda: read(store, keys(chain("c", 3))) == [ReadResult.HIT] * 3)
    store.close()


@pytest.fixture
def holder(master: MooncakeMaster) -> Iterator[subprocess.Popen[str]]:
    """Another process, whose memory holds the four blocks of the chain `held`."""
    import json

    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, json.dumps(master.config())], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{['stored'] * 4}\n"
    yield process
    process.kill()
    process.wait()


def test_the_client_that_holds_the_data_is_killed(
    master: MooncakeMaster, holder: subprocess.Popen[str]
) -> None:
    store = open_store("mooncake", master.config(), 3.0)
    blocks = chain("held", 4)
    assert read(store, keys(blocks)) == [ReadResult.HIT] * 4
    holder.kill()
    holder.wait()
    # The master still names the blocks, but nobody has them.
    assert read(store, keys(blocks[:2])) == [ReadResult.ERROR] * 2
    assert store.counters.reasons["read_failed"] == 2
    # A plain put would be acknowledged and lost; ours is written, because the dead keys were removed.
    assert store.put_many(blocks[:2]) == [PutResult.STORED] * 2
    assert read(store, keys(blocks[:2])) == [ReadResult.HIT] * 2
    # Even blocks that nobody has tried to read yet: the master drops them when the holder's time is up.
    until(lambda: store.exists_many(keys(blocks)) == [True, True, False, False])
    assert store.put_many(blocks) == [PutResult.EXISTS] * 2 + [PutResult.STORED] * 2
    until(lambda: read(store, keys(blocks)) == [ReadResult.HIT] * 4)
    store.close()
