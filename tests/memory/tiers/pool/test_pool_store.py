"""The pool tier over real backends, healthy and broken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.contracts.block_store_suite import (
    BLOCK_BYTES,
    ROOT,
    BlockStoreContract,
    bytes_of,
    chain,
    key_of,
    keys,
    read,
)
from tests.memory.tiers.pool.faulty import DeadBackend, FaultyBackend
from tests.memory.tiers.pool.servers import MooncakeMaster, RedisServer

from stemma.config.settings import PoolSettings
from stemma.errors import StorageError
from stemma.memory.tiers.block_store import BlockPut, BlockStore, PutResult, ReadResult
from stemma.memory.tiers.pool.backend import Parts, PoolBackend
from stemma.memory.tiers.pool.breaker import Circuit
from stemma.memory.tiers.pool.envelope import seal
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.memory.tiers.pool.registry import open_pool_backend
from stemma.memory.tiers.pool.shared_directory import open_backend

NAMES = PoolKeys("tiny")
SYNC = PoolSettings(name="directory", deadline_s=5.0)


class TestDirectoryStore(BlockStoreContract):
    def make_store(self, tmp_path: Path, capacity_blocks: int) -> BlockStore:
        return PoolStore(open_backend({"path": str(tmp_path / "pool")}), NAMES, BLOCK_BYTES, SYNC)


class TestRedisStore(BlockStoreContract):
    @pytest.fixture(scope="class")
    def server(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
        yield server
        server.stop()

    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        self._url = server.url

    def make_store(self, tmp_path: Path, capacity_blocks: int) -> BlockStore:
        backend = open_pool_backend("redis", {"url": self._url, "prefix": f"{tmp_path.name}:"})
        return PoolStore(backend, NAMES, BLOCK_BYTES, SYNC)


class _KeptOpen(FaultyBackend):
    """Closing a Mooncake client takes a second: one serves all tests."""

    def close(self) -> None:
        return None


class TestMooncakeStore(BlockStoreContract):
    @pytest.fixture(scope="class")
    def client(self) -> Iterator[tuple[PoolBackend, list[PoolStore]]]:
        master = MooncakeMaster()
        client = open_pool_backend("mooncake", master.config())
        # What a client has registered must live as long as the client: keep the stores and their slots.
        yield client, []
        client.close()
        master.stop()

    @pytest.fixture(autouse=True)
    def _client(self, client: tuple[PoolBackend, list[PoolStore]]) -> None:
        self._backend, self._stores = client

    def make_store(self, tmp_path: Path, capacity_blocks: int) -> BlockStore:
        settings = SYNC.model_copy(update={"staging": 1 << 20})
        store = PoolStore(_KeptOpen(self._backend), PoolKeys(tmp_path.name), BLOCK_BYTES, settings)
        self._stores.append(store)
        return store


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backend(tmp_path: Path) -> FaultyBackend:
    return FaultyBackend(open_backend({"path": str(tmp_path / "pool")}))


def store_over(backend: FaultyBackend, clock: Clock, **changes: object) -> PoolStore:
    settings = PoolSettings.model_validate({"name": "directory", "deadline_s": 0.2} | changes)
    return PoolStore(backend, NAMES, BLOCK_BYTES, settings, clock=clock)


def test_a_late_read_is_late_and_its_bytes_never_reach_the_caller(
    backend: FaultyBackend, clock: Clock
) -> None:
    store = store_over(backend, clock)
    blocks = chain("a", 80)
    store.put_many(blocks)
    backend.gate.clear()
    mine = [bytearray(BLOCK_BYTES) for _ in blocks]
    assert store.get_many(keys(blocks), [memoryview(b) for b in mine]) == [ReadResult.LATE] * 80
    assert store.counters.reasons["late"] == 64  # one batch was asked, the rest wasn't
    assert store.status().circuit is Circuit.OPEN
    backend.gate.set()
    _until(lambda: store.staging.slots.num_taken == 0)
    assert mine == [bytearray(BLOCK_BYTES)] * 80


def test_an_open_circuit_answers_at_once_and_a_probe_closes_it(backend: FaultyBackend, clock: Clock) -> None:
    store = store_over(backend, clock)
    blocks = chain("a", 2)
    store.put_many(blocks)
    backend.gate.clear()
    assert store.exists_many(keys(blocks)) == [False, False]
    num_calls = len(backend.calls)
    assert store.exists_many(keys(blocks)) == [False, False]
    assert read(store, keys(blocks)) == [ReadResult.ERROR] * 2
    assert store.put_many(blocks) == [PutResult.ERROR] * 2
    assert store.remove(keys(blocks)) == 0
    assert len(backend.calls) == num_calls
    assert store.counters.reasons["circuit_open"] == 6
    backend.gate.set()
    clock.now = 1.5
    store.status()  # sends the probe
    _until(lambda: store.status().circuit is Circuit.CLOSED)
    assert read(store, keys(blocks)) == [ReadResult.HIT] * 2


@pytest.mark.parametrize("error", [StorageError("gone"), RuntimeError("a bug of a third party")])
def test_quick_failures_are_misses_and_open_the_circuit(
    backend: FaultyBackend, clock: Clock, error: Exception
) -> None:
    store = store_over(backend, clock)
    blocks = chain("a", 1)
    store.put_many(blocks)
    backend.error = error
    for _ in range(3):
        assert read(store, keys(blocks)) == [ReadResult.ERROR]
    status = store.status()
    assert (status.circuit, status.last_error) == (Circuit.OPEN, str(error))
    assert sum(store.counters.reasons[name] for name in ("unreachable", "backend_error")) == 3


def test_a_backend_that_raises_from_everything_can_even_be_closed() -> None:
    store = PoolStore(DeadBackend(), NAMES, BLOCK_BYTES, SYNC)
    block = chain("a", 1)
    assert store.put_many(block) == [PutResult.ERROR]
    assert store.exists_many(keys(block)) == [False]
    assert read(store, keys(block)) == [ReadResult.ERROR]
    store.close()


@pytest.mark.parametrize(
    ("at", "reason"), [(0, "bad_header"), (30, "bad_header"), (64, "checksum"), (-1, "checksum")]
)
def test_garbage_is_a_counted_corrupt_miss_and_is_replaced(
    backend: FaultyBackend, clock: Clock, at: int, reason: str
) -> None:
    store = store_over(backend, clock)
    blocks = chain("a", 1)
    store.put_many(blocks)

    def flip(parts: Parts) -> None:
        parts[0][at] ^= 1

    backend.spoil = flip
    assert read(store, keys(blocks)) == [ReadResult.CORRUPT]
    assert store.counters.reasons[reason] == 1
    backend.spoil = None
    assert store.put_many(blocks) == [PutResult.STORED]  # the bad value was removed
    assert read(store, keys(blocks)) == [ReadResult.HIT]


def test_a_value_of_another_key_is_corrupt(backend: FaultyBackend, clock: Clock) -> None:
    store = store_over(backend, clock)
    mine, other = chain("mine", 1)[0], chain("other", 1)[0]
    header = memoryview(bytearray(64))
    seal(NAMES.own(other.key), other.data, header)
    backend.inner.put_many([NAMES.own(mine.key)], [(header, other.data)])
    assert read(store, [mine.key]) == [ReadResult.CORRUPT]
    assert store.counters.reasons["wrong_key"] == 1


def test_no_space_is_tried_again_and_then_reported(backend: FaultyBackend, clock: Clock) -> None:
    store = store_over(backend, clock)
    backend.full_for = 3
    assert store.put_many(chain("a", 2)) == [PutResult.STORED] * 2
    backend.full_for = 4
    assert store.put_many(chain("b", 2)) == [PutResult.NO_SPACE] * 2
    assert store.counters.reasons["no_space"] == 2
    assert store.staging.slots.num_taken == 0


def test_absent_keys_are_not_asked_for_again_at_once(backend: FaultyBackend, clock: Clock) -> None:
    store = store_over(backend, clock)
    blocks = chain("a", 2)
    assert store.exists_many(keys(blocks)) == [False, False]
    assert read(store, keys(blocks)) == [ReadResult.MISS] * 2
    assert store.counters.reasons["negative_cache"] == 2
    assert (backend.num_asked("exists"), backend.num_asked("get")) == (2, 0)
    store.put_many(blocks[:1])  # a put of ours is known at once
    assert store.exists_many(keys(blocks)) == [True, False]
    clock.now = 1.0  # a put of another server's after half a second
    store_over(backend, clock).put_many(blocks[1:])
    assert store.exists_many(keys(blocks)) == [True, True]


def test_a_probe_stops_at_the_batch_with_a_gap(backend: FaultyBackend, clock: Clock) -> None:
    store = store_over(backend, clock)
    blocks = chain("a", 200)
    store.put_many(blocks[:70])
    assert store.exists_many(keys(blocks)) == [True] * 70 + [False] * 130
    assert backend.num_asked("exists") == 128


def test_each_rank_has_its_own_part_of_a_block(tmp_path: Path, clock: Clock) -> None:
    def rank(number: int) -> PoolStore:
        pool = open_backend({"path": str(tmp_path)})
        return PoolStore(pool, PoolKeys("tiny", number, 2), BLOCK_BYTES, SYNC, clock=clock)

    first, second = rank(0), rank(1)
    blocks, others = chain("a", 2), chain("b", 2)
    theirs = [replace(block, data=other.data) for block, other in zip(blocks, others, strict=True)]
    first.put_many(blocks)
    assert second.exists_many(keys(blocks)) == [False, False]
    assert second.put_many(theirs) == [PutResult.STORED] * 2
    clock.now = 1.0
    assert first.exists_many(keys(blocks)) == second.exists_many(keys(blocks)) == [True, True]
    for store, expected in ((first, blocks), (second, theirs)):
        into = [memoryview(bytearray(BLOCK_BYTES)) for _ in blocks]
        assert store.get_many(keys(blocks), into) == [ReadResult.HIT] * 2
        assert into == [block.data for block in expected]
    second.remove([blocks[1].key])
    assert second.exists_many(keys(blocks)) == [True, False]
    assert first.exists_many(keys(blocks)) == [True, True]


def test_a_missing_answer_is_a_failed_call(backend: FaultyBackend, clock: Clock) -> None:
    store = store_over(backend, clock)
    blocks = chain("a", 3)
    store.put_many(blocks)
    backend.num_results_lost = 1
    assert store.exists_many(keys(blocks)) == [False] * 3
    assert read(store, keys(blocks)) == [ReadResult.ERROR] * 3
    assert store.counters.reasons["unreachable"] == 6


def test_slots_held_by_stuck_calls_make_reads_late_not_stuck(backend: FaultyBackend, clock: Clock) -> None:
    store = store_over(backend, clock, staging=1)
    assert store.staging.slots.size == 2
    blocks = chain("a", 6)
    assert store.put_many(blocks) == [PutResult.STORED] * 6
    assert read(store, keys(blocks)) == [ReadResult.HIT] * 6
    backend.gate.clear()
    assert read(store, keys(blocks)) == [ReadResult.LATE] * 6
    clock.now = 100.0
    assert read(store, keys(blocks)) == [ReadResult.ERROR] * 6
    backend.gate.set()


def test_an_owner_over_its_quota_loses_what_this_server_wrote(backend: FaultyBackend, clock: Clock) -> None:
    store = store_over(backend, clock)
    ada = [replace(block, owner="ada") for block in chain("a", 5)]
    others = chain("b", 5)
    store.put_many(others)
    store.set_quotas({"ada": 3})
    store.put_many(ada)
    assert store.exists_many(keys(ada)) == [True] * 3 + [False] * 2
    assert store.exists_many(keys(others)) == [True] * 5
    more = [replace(block, owner="ada") for block in chain("c", 2)]
    store.put_many(more)
    assert sum(store.exists_many([key])[0] for key in keys([*ada, *more])) == 3
    assert store.exists_many(keys(more)) == [True] * 2
    assert store.counters.reasons["over_quota"] == 4


def test_registered_memory_is_used_in_place(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InPlace(FaultyBackend):
        def register(self, memory: memoryview) -> None:
            return None

    backend = InPlace(open_backend({"path": str(tmp_path)}))
    backend.zero_copy = True
    store = store_over(backend, clock)
    arena = np.zeros(8 * BLOCK_BYTES, dtype=np.uint8)
    store.register(arena.data)
    block = arena.data[:BLOCK_BYTES]
    block[:] = bytes_of(key_of("a"))
    seen: list[Parts] = []
    original = backend.inner.put_many

    def put_many(names: Sequence[str], values: Sequence[Parts]) -> list[PutResult]:
        seen.extend(values)
        return original(names, values)

    monkeypatch.setattr(backend.inner, "put_many", put_many)
    assert store.put_many([BlockPut(key_of("a"), ROOT, block)]) == [PutResult.STORED]
    assert seen[0][1] is block
    into = arena.data[BLOCK_BYTES : 2 * BLOCK_BYTES]
    assert store.get_many([key_of("a")], [into]) == [ReadResult.HIT]
    assert into == block


def test_a_late_read_into_registered_memory_is_waited_for(tmp_path: Path, clock: Clock) -> None:
    backend = FaultyBackend(open_backend({"path": str(tmp_path)}))
    backend.zero_copy = True
    store = store_over(backend, clock, deadline_s=0.05)
    arena = np.zeros(2 * BLOCK_BYTES, dtype=np.uint8)
    store.register(arena.data)
    store.put_many(chain("a", 1))
    backend.gate.clear()
    results: list[list[ReadResult]] = []
    reader = threading.Thread(
        target=lambda: results.append(store.get_many(keys(chain("a", 1)), [arena.data[:BLOCK_BYTES]]))
    )
    reader.start()
    _until(lambda: store.status().circuit is Circuit.OPEN)
    assert not results  # the backend may still write into the caller's memory
    backend.gate.set()
    reader.join()
    assert results == [[ReadResult.LATE]]
    _until(lambda: store.staging.headers.num_taken == 0)


def test_batches_of_registered_memory_dont_depend_on_slots(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FaultyBackend(open_backend({"path": str(tmp_path)}))
    backend.zero_copy = True
    store = store_over(backend, clock, staging=1)
    assert store.staging.slots.size == 2
    arena = np.zeros(100 * BLOCK_BYTES, dtype=np.uint8).data
    store.register(arena)
    places = [arena[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(100)]
    blocks = chain("a", 100)
    for block, place in zip(blocks, places, strict=True):
        place[:] = block.data
    puts = [BlockPut(b.key, b.parent, place) for b, place in zip(blocks, places, strict=True)]
    assert store.put_many(puts) == [PutResult.STORED] * 100
    arena[:] = bytes(len(arena))
    calls: list[int] = []
    get_many = backend.inner.get_many

    def counted(names: Sequence[str], into: Sequence[Parts]) -> list[ReadResult]:
        calls.append(len(names))
        return get_many(names, into)

    monkeypatch.setattr(backend.inner, "get_many", counted)
    assert store.get_many(keys(blocks), places) == [ReadResult.HIT] * 100
    assert [bytes(place) for place in places] == [bytes_of(key) for key in keys(blocks)]
    assert calls == [64, 36]
    assert store.staging.headers.num_taken == 0


def test_a_loan_keeps_its_slots_until_it_is_given_back(backend: FaultyBackend, clock: Clock) -> None:
    store = store_over(backend, clock, staging=1)
    assert store.staging.slots.size == 2
    blocks = chain("a", 5)
    store.put_many(blocks)
    first = store.lend_many(keys(blocks))
    assert first.results == [ReadResult.HIT] * 2
    assert store.lend_many(keys(blocks[2:])).results == [ReadResult.LATE] * 3  # no slot within the deadline
    assert read(store, keys(blocks[2:])) == [ReadResult.LATE] * 3
    assert [bytes(place) for place in first.places] == [block.data for block in blocks[:2]]
    first.free()
    second = store.lend_many(keys(blocks[2:]))
    assert [bytes(place) for place in second.places] == [block.data for block in blocks[2:4]]
    second.free()


def test_slots_of_a_late_loan_are_free_only_when_the_backend_is_done(
    backend: FaultyBackend, clock: Clock
) -> None:
    store = store_over(backend, clock)
    blocks = chain("a", 3)
    store.put_many(blocks)
    backend.gate.clear()
    late = store.lend_many(keys(blocks))
    assert (late.results, late.places) == ([ReadResult.LATE] * 3, ())
    late.free()  # gives nothing: the backend has them
    assert store.staging.slots.num_taken == 3
    assert store.status().circuit is Circuit.OPEN
    assert set(store.lend_many(keys(blocks)).results) == {ReadResult.ERROR}
    store.close()
    assert store.staging.slots.num_taken == 3
    backend.gate.set()
    _until(lambda: store.staging.slots.num_taken == 0)


@pytest.mark.parametrize("at", [0, 2])
def test_a_loan_ends_before_a_key_known_to_be_absent(backend: FaultyBackend, clock: Clock, at: int) -> None:
    store = store_over(backend, clock)
    blocks = chain("a", 4)
    store.put_many(blocks)
    store.remove([blocks[at].key])
    assert not store.exists_many([blocks[at].key])[0]
    loan = store.lend_many(keys(blocks))
    assert loan.results == ([ReadResult.HIT] * at or [ReadResult.MISS])
    loan.free()
    assert store.staging.slots.num_taken == 0


def test_loans_grow_while_the_backend_is_fast_and_shrink_before_they_are_late(
    backend: FaultyBackend, clock: Clock
) -> None:
    store = store_over(backend, clock, deadline_s=2.0)
    wanted = keys(chain("a", 64))
    store.put_many(chain("a", 64))

    def lent() -> int:
        loan = store.lend_many(wanted)
        loan.free()
        return loan.results.count(ReadResult.HIT)

    assert [lent() for _ in range(4)] == [16, 32, 64, 64]
    backend.spoil = lambda parts: time.sleep(1.1 / 64)
    assert [lent(), lent()] == [64, 32]
    assert store.status().circuit is Circuit.CLOSED


def test_a_spoiled_block_is_lent_to_nobody(backend: FaultyBackend, clock: Clock) -> None:
    store = store_over(backend, clock)
    blocks = chain("a", 1)
    store.put_many(blocks)

    def flip(parts: Parts) -> None:
        parts[0][-1] ^= 1

    backend.spoil = flip
    loan = store.lend_many(keys(blocks))
    assert loan.results == [ReadResult.CORRUPT]
    assert store.counters.reasons["checksum"] == 1
    loan.free()


def test_a_call_that_finds_its_store_just_closed_is_a_storage_error(
    backend: FaultyBackend, clock: Clock
) -> None:
    """A load may be on its way when its pool is detached; its thread must live on."""
    store = store_over(backend, clock)
    blocks = chain("a", 100)  # two calls of the backend
    store.put_many(blocks)

    def refuses() -> bool:
        try:
            store.exists_many(keys(blocks[:1]))
        except StorageError:
            return True
        return False

    def close(_parts: Parts) -> None:
        backend.spoil = None
        threading.Thread(target=store.close).start()  # it waits for the call that this is
        _until(refuses)

    backend.spoil = close
    with pytest.raises(StorageError, match="closed"):
        read(store, keys(blocks))


def test_a_backend_is_closed_behind_the_calls_that_run(
    backend: FaultyBackend, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake's client ends the process where it is closed under one; those that wait are given up."""
    store = store_over(backend, clock)
    events: list[str] = []
    exists_many = backend.exists_many

    def ask(names: Sequence[str]) -> list[bool]:
        found = exists_many(names)
        events.append("answered")
        return found

    monkeypatch.setattr(backend, "exists_many", ask)
    monkeypatch.setattr(backend, "close", lambda: events.append("closed"))
    backend.gate.clear()
    assert store.exists_many(keys(chain("a", 2))) == [False, False]  # late, and still running
    store.close()
    assert not events
    backend.gate.set()
    _until(lambda: len(events) == 2)
    assert events == ["answered", "closed"]


def _until(condition: object) -> None:
    """Wait for a background thread, up to 10 s."""
    pause = threading.Event()
    for _ in range(1000):
        if condition():  # type: ignore[operator]
            return
        pause.wait(0.01)
    raise AssertionError("it never came to be")
