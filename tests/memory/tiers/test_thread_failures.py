"""Every thread of the tiers: an error that nobody expects is reported, and nobody waits for the thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from tests.memory.manual_clock import ManualClock
from tests.memory.recording_supervisor import RecordingSupervisor
from tests.memory.tiers.transfer_rig import BLOCK, LAYOUT, TIMEOUT_S
from tests.memory.tiers.transfer_rig import Rig as TransferRig

from stemma.memory.device.copy import DeviceCopy
from stemma.memory.tiers.block_store import BlockPut, BlockStore, PutResult, ReadResult
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.pool.calls import Calls
from stemma.memory.tiers.transfer import TierTransfer, TransferPolicy
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.types import BlockKey, Tier

ERRORS = (OverflowError("cannot convert float infinity to integer"), MemoryError(), AssertionError("a bug"))


class BrokenStore(BlockStore):
    """A slow store that raises whatever the test says, where it says."""

    tier = Tier.POOL

    def __init__(self) -> None:
        self._inner = HostStore(BLOCK, 64 * BLOCK, LRUPolicy(), ManualClock())
        self.block_bytes = BLOCK
        self.counters = self._inner.counters
        self.raises: dict[str, BaseException] = {}

    def _check(self, method: str) -> None:
        if method in self.raises:
            raise self.raises[method]

    def exists_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._check("exists")
        return self._inner.exists_many(keys)

    def get_many(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[ReadResult]:
        self._check("get")
        return self._inner.get_many(keys, into)

    def fetch_many(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview]
    ) -> Callable[[], list[ReadResult]]:
        self._check("fetch")
        fetched = self._inner.fetch_many(keys, into)

        def prove() -> list[ReadResult]:
            results = fetched()
            self._check("prove")
            return results

        return prove

    def put_many(self, blocks: Sequence[BlockPut]) -> list[PutResult]:
        self._check("put")
        return self._inner.put_many(blocks)

    def remove(self, keys: Sequence[BlockKey]) -> int:
        return self._inner.remove(keys)

    def close(self) -> None:
        self._inner.close()


class Rig(TransferRig):
    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.store = BrokenStore()
        self.supervisor = RecordingSupervisor()
        self.transfer = TierTransfer(
            DeviceCopy(self.kv),
            None,
            [self.store],
            TransferPolicy(writes={Tier.POOL: "write_through"}, prefetch="wait_complete", load_always=True),
            self.clock,
            block_size=LAYOUT.block_size,
            num_staging_slots=4,
            supervisor=self.supervisor,
        )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.transfer.close()


@pytest.mark.parametrize("error", ERRORS)
def test_a_write_that_raises_is_reported_and_the_thread_goes_on(rig: Rig, error: Exception) -> None:
    rig.store.raises["put"] = error
    blocks = rig.fill("a", 8)
    for start in (0, 4):  # staging holds 4: its slots come back
        rig.transfer.on_commit(blocks[start : start + 4])
        assert rig.transfer.drain(TIMEOUT_S)
    assert set(rig.supervisor.failures) == {("stemma-write-pool", error)}
    assert not any(rig.transfer.stats().dropped_writes.values())
    assert rig.transfer.match([block.key for block in blocks]) == []  # nobody takes them for written
    rig.store.raises.clear()
    rig.transfer.on_commit(blocks[:4])
    assert rig.transfer.drain(TIMEOUT_S)
    assert rig.store.exists_many([block.key for block in blocks]) == [True] * 4 + [False] * 4


def test_a_writer_that_dies_is_reported_and_nobody_waits_for_it(rig: Rig) -> None:
    rig.store.raises["put"] = SystemExit(1)
    blocks = rig.fill("a", 8)
    rig.transfer.on_commit(blocks[:4])
    rig.supervisor.wait(1)
    assert rig.transfer.drain(TIMEOUT_S)
    rig.transfer.on_commit(blocks[4:])
    assert rig.transfer.drain(TIMEOUT_S)
    assert rig.transfer.wait_for_queued(Tier.POOL, TIMEOUT_S)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["exists", "fetch", "prove"])
def test_a_read_that_raises_is_a_miss_and_is_reported(rig: Rig, where: str, error: Exception) -> None:
    blocks = rig.fill("a", 3)
    rig.transfer.on_commit(blocks)
    assert rig.transfer.drain(TIMEOUT_S)
    keys = [block.key for block in blocks]
    if where == "exists":
        rig.transfer.flush()  # else nobody asks for what was just written
    rig.store.raises[where] = error
    for _ in range(4):  # more often than there are threads
        assert rig.transfer.load(keys, [10, 11, 12]).result(TIMEOUT_S) == 0
    assert len(rig.supervisor.failures) == 4
    assert {name.rstrip("01") for name, _ in rig.supervisor.failures} == {"stemma-load-"}
    rig.store.raises.clear()
    assert rig.transfer.load(keys, [10, 11, 12]).result(TIMEOUT_S) == 3
    assert rig.content(10) == rig.content(blocks[0].block_id)


@pytest.mark.parametrize("error", [*ERRORS, SystemExit(1)])
def test_a_pool_call_that_raises_anything_is_over(error: BaseException) -> None:
    calls = Calls(1)

    def broken() -> int:
        raise error

    assert calls.start(broken).exception(TIMEOUT_S) is error
    assert calls.start(lambda: 7).result(TIMEOUT_S) == 7
    calls.close(lambda: None)


def test_what_follows_a_pool_call_may_raise(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(1)
    followed: list[int] = []

    def broken(call: Future[bool]) -> None:
        raise OverflowError("a bug")

    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            gate = threading.Event()
            call = calls.start(partial(gate.wait, TIMEOUT_S))
            call.add_done_callback(broken)
            call.add_done_callback(lambda _: followed.append(1))
            gate.set()
            assert call.result(TIMEOUT_S)
    calls.start(lambda: None).result(TIMEOUT_S)  # the thread is done with the others
    assert followed == [1] * 3
    assert "a bug" in caplog.text
    calls.close(lambda: None)


def test_a_chunk_is_proven_once_where_no_thread_can_be_started(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor queues the work and only then fails to start a thread; a later one would find it."""
    num_proven: list[int] = []
    fetch = rig.store.fetch_many

    def counted(keys: Sequence[BlockKey], into: Sequence[memoryview]) -> Callable[[], list[ReadResult]]:
        prove, number = fetch(keys, into), len(num_proven)
        num_proven.append(0)

        def once_more() -> list[ReadResult]:
            num_proven[number] += 1
            return prove()

        return once_more

    start = threading.Thread.start

    def start_unless_first(thread: threading.Thread) -> None:
        if thread.name.startswith("stemma-deliver") and len(num_proven) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    blocks = rig.fill("a", 2)
    rig.transfer.on_commit(blocks)
    assert rig.transfer.drain(TIMEOUT_S)
    monkeypatch.setattr(rig.store, "fetch_many", counted)
    monkeypatch.setattr(threading.Thread, "start", start_unless_first)
    wanted = [block.key for block in blocks]
    loaded = [rig.transfer.load(wanted, [16, 17]).result(TIMEOUT_S) for _ in range(2)]
    assert loaded == [0, 2]
    assert num_proven == [1, 1]
    assert rig.supervisor.failures == []
