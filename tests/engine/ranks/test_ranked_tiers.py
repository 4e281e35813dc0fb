"""The tiers of two ranks as one. Rank 1 is a second set of tiers in this process, called as it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stemma.config.settings import PoolSettings
from stemma.engine.ranks.messages import StopPrefetch, Tell
from stemma.engine.ranks.tiers import RankedTiers
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.loads import Prefetch
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.memory.tiers.pool.shared_directory import open_backend
from stemma.memory.tiers.pool_asks import PoolAsk
from stemma.memory.tiers.transfer import TierTransfer, TransferPolicy
from stemma.model.parallel.share import Share
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.types import BlockKey, Tier

LAYOUT = KVLayout(1, 2, 4, 1, 4, "float32")
KEYS = [BlockKey(bytes([n]) * 32) for n in range(1, 7)]
BLOCKS = [DeviceBlock(n, key, KEYS[n - 1] if n else BlockKey(bytes(32)), 4) for n, key in enumerate(KEYS)]
WAIT_S = 20.0


class Rank:
    """Device and tiers of one rank; its blocks hold its own bytes."""

    def __init__(self, rank: int, num_host_blocks: int, pool: Path | None = None) -> None:
        self.kv = DeviceKV(LAYOUT, 16)
        for block in BLOCKS:
            self.kv.block_bytes_view(block.block_id).fill_(10 * rank + block.block_id)
        size = LAYOUT.block_bytes
        self.host = HostStore(size, max(1, num_host_blocks) * size, LRUPolicy(), time.monotonic)
        self.tiers = TierTransfer(
            DeviceCopy(self.kv),
            self.host if num_host_blocks else None,
            [],
            TransferPolicy({Tier.HOST: "write_through"}, load_always=True, load_timeout_s=WAIT_S),
            time.monotonic,
            block_size=4,
            num_staging_slots=16,
        )

        if pool is not None:
            settings = PoolSettings(name="directory", deadline_s=WAIT_S)
            names = PoolKeys("tiny", rank, 2)
            self.pool = PoolStore(open_backend({"path": str(pool)}), names, size, settings)
            self.tiers.attach(self.pool)

    def first_byte(self, block_id: int) -> int:
        return int(self.kv.block_bytes_view(block_id)[0])


class OtherRank:
    """Stands for `Ranks`: does at once, with rank 1's tiers, what a rank would do when told."""

    share = Share(0, 2)

    def __init__(self, other: TierTransfer) -> None:
        self._other = other
        self._prefetches: dict[int, Prefetch] = {}
        self.asks: list[PoolAsk] = []

    def tell(self, message: Any) -> None:
        self.tell_each([message])

    def tell_each(self, messages: Sequence[Any]) -> None:
        [message] = messages
        if isinstance(message, StopPrefetch):
            self._prefetches.pop(message.number).stop()
            return
        assert isinstance(message, Tell)
        getattr(self._other, message.method)(*message.arguments)

    def ask(self, method: str, *arguments: Any) -> list[Future[Any]]:
        answer: Future[Any] = Future()
        answer.set_result(getattr(self._other, method)(*arguments))
        return [answer]

    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> list[Future[int]]:
        return [self._other.load(keys, block_ids)]

    def prefetch(
        self, parent: BlockKey, keys: Sequence[BlockKey], owners: Sequence[str], ask: PoolAsk
    ) -> tuple[int, list[Future[float]]]:
        self.asks.append(ask)
        started = self._other.prefetch(parent, keys, owners, ask=ask)
        assert started is not None
        self._prefetches[7] = started
        taken: Future[float] = Future()
        started.probe.add_done_callback(lambda _: taken.set_result(self._other.asks.ask_s))
        return 7, [taken]

    def result(self, future: Future[Any], timeout_s: float = WAIT_S) -> Any:
        return future.result(timeout_s)


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank, RankedTiers]]:
    """Rank 1's host tier holds fewer blocks."""
    first, second = Rank(0, 8), Rank(1, 4)
    other: Any = OtherRank(second.tiers)
    yield first, second, RankedTiers(first.tiers, other)
    for one in (first, second):
        one.tiers.check()
        one.tiers.close()


def test_the_shortest_prefix_counts(ranks: tuple[Rank, Rank, RankedTiers]) -> None:
    first, second, tiers = ranks
    tiers.on_commit(BLOCKS)
    held = [len(first.tiers.match(KEYS)), len(second.tiers.match(KEYS))]
    assert held[0] == 6 > held[1] > 0
    assert len(tiers.match(KEYS)) == held[1]
    assert tiers.stats().missing_by_rank == {0: 0, 1: 6 - held[1]}
    assert tiers.lookup(KEYS)[Tier.HOST].count(True) == held[1]
    left = tiers.passed_over(KEYS)
    assert left is not None
    assert left.num_blocks == held[1]


def test_nothing_counts_that_one_rank_has_lost(ranks: tuple[Rank, Rank, RankedTiers]) -> None:
    first, second, tiers = ranks
    tiers.on_commit(BLOCKS[:3])
    second.host.remove(KEYS[:3])
    assert tiers.match(KEYS[:3]) == []
    assert tiers.passed_over(KEYS[:3]) is None
    tiers.on_commit(BLOCKS[:3])  # computed again: written by who lacks them
    first.host.remove(KEYS[2:3])
    assert len(tiers.match(KEYS[:3])) == 2
    assert tiers.stats().missing_by_rank == {0: 1, 1: 3}


def test_each_rank_loads_its_own_bytes(ranks: tuple[Rank, Rank, RankedTiers]) -> None:
    first, second, tiers = ranks
    tiers.on_commit(BLOCKS[:3])
    assert tiers.load(KEYS[:3], [9, 10, 11]).result(WAIT_S) == 3
    assert [first.first_byte(n) for n in (9, 10, 11)] == [0, 1, 2]
    assert [second.first_byte(n) for n in (9, 10, 11)] == [10, 11, 12]


def test_a_load_that_fails_on_one_rank_is_shorter(ranks: tuple[Rank, Rank, RankedTiers]) -> None:
    _, second, tiers = ranks
    tiers.on_commit(BLOCKS[:3])
    second.host.remove(KEYS[1:3])
    loading = tiers.load(KEYS[:3], [9, 10, 11])
    assert not loading.cancel()  # the other rank writes into the blocks
    assert loading.result(WAIT_S) == 1
    assert tiers.stats().missing_by_rank == {0: 0, 1: 2}


def test_pins_hold_where_all_ranks_have_the_block(ranks: tuple[Rank, Rank, RankedTiers]) -> None:
    first, second, tiers = ranks
    tiers.on_commit(BLOCKS[:3])
    second.host.remove(KEYS[2:3])
    pinned = tiers.pin(KEYS[:3])
    assert pinned == {Tier.HOST: KEYS[:2]}
    assert tiers.flush() == {Tier.HOST: 1}
    assert first.host.num_blocks == second.host.num_blocks == 2
    tiers.unpin(pinned)
    assert tiers.flush() == {Tier.HOST: 2}
    assert second.host.num_blocks == 0


@pytest.fixture
def pooled(tmp_path: Path) -> Iterator[tuple[Rank, Rank, RankedTiers]]:
    """Two ranks with nothing but one pool, which holds their parts of three blocks."""
    first, second = Rank(0, 0, tmp_path), Rank(1, 0, tmp_path)
    other: Any = OtherRank(second.tiers)
    tiers = RankedTiers(first.tiers, other)
    tiers.on_commit(BLOCKS[:3])
    for one in (first, second):
        assert one.tiers.drain(WAIT_S)
    tiers.flush()  # forget what was written there
    yield first, second, tiers
    for one in (first, second):
        one.tiers.close()


def probed(tiers: RankedTiers) -> int:
    """Let both ranks ask the pool; return how many of three blocks they have."""
    started = tiers.prefetch(BlockKey(bytes(32)), KEYS[:3])
    assert started is not None
    started.probe.result(WAIT_S)
    started.stop()
    return len(tiers.match(KEYS[:3]))


def test_each_rank_has_its_part_in_the_pool(pooled: tuple[Rank, Rank, RankedTiers]) -> None:
    first, second, tiers = pooled
    assert tiers.match(KEYS[:3]) == []  # nobody has asked
    assert probed(tiers) == 3
    assert tiers.load(KEYS[:3], [9, 10, 11]).result(WAIT_S) == 3
    assert [first.first_byte(n) for n in (9, 10, 11)] == [0, 1, 2]
    assert [second.first_byte(n) for n in (9, 10, 11)] == [10, 11, 12]
    assert tiers.stats().missing_by_rank == {0: 0, 1: 0}


def test_a_part_that_is_missing_in_the_pool_is_a_miss_of_that_rank(
    pooled: tuple[Rank, Rank, RankedTiers],
) -> None:
    _, second, tiers = pooled
    second.pool.remove(KEYS[1:2])
    assert probed(tiers) == 1
    assert tiers.stats().missing_by_rank == {0: 0, 1: 2}
    tiers.on_commit(BLOCKS[:3])  # computed again: the rank that lacks it writes it
    assert second.tiers.drain(WAIT_S)
    assert second.pool.counters.puts[PutResult.STORED] >= 4
    tiers.flush()
    assert probed(tiers) == 3


def test_a_part_that_is_damaged_in_the_pool_is_never_used(
    pooled: tuple[Rank, Rank, RankedTiers], tmp_path: Path
) -> None:
    first, second, tiers = pooled
    [file] = tmp_path.rglob(f"{KEYS[1].hex()}_1_2_*")
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    [other] = tmp_path.rglob(f"{KEYS[2].hex()}_0_2_*")
    [theirs] = tmp_path.rglob(f"{KEYS[2].hex()}_1_2_*")
    theirs.write_bytes(other.read_bytes())  # another rank's bytes under this rank's name
    assert probed(tiers) == 3
    assert tiers.load(KEYS[:3], [9, 10, 11]).result(WAIT_S) == 1
    assert tiers.stats().missing_by_rank == {0: 0, 1: 2}
    assert second.pool.counters.reads[ReadResult.CORRUPT] >= 1
    assert (first.first_byte(9), second.first_byte(9)) == (0, 10)


def test_a_probe_waits_for_every_rank(pooled: tuple[Rank, Rank, RankedTiers]) -> None:
    first, second, _ = pooled
    theirs: Future[float] = Future()

    class Slow(OtherRank):
        def prefetch(self, *_arguments: object) -> tuple[int, list[Future[float]]]:
            return 1, [theirs]

    slow: Any = Slow(second.tiers)
    tiers = RankedTiers(first.tiers, slow)
    started = tiers.prefetch(BlockKey(bytes(32)), KEYS[:3])
    assert started is not None
    assert not started.probe.done()
    theirs.set_result(0.1)
    started.probe.result(WAIT_S)


@pytest.mark.parametrize("far", [0, 1])
def test_ranks_with_different_measurements_take_the_same_way(
    tmp_path: Path, far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link of one of them to the pool is slow; rank 0 decides for both, by the slower one."""
    first, second = both = Rank(0, 0, tmp_path), Rank(1, 0, tmp_path)
    num_asked = [0, 0]
    for number, one in enumerate(both):

        def exists_many(
            keys: Sequence[BlockKey], number: int = number, pool: PoolStore = one.pool
        ) -> list[bool]:
            num_asked[number] += 1
            return PoolStore.exists_many(pool, keys)

        monkeypatch.setattr(one.pool, "exists_many", exists_many)
        one.tiers.asks.observe(1, 0, 5.0 if number == far else 0.0)
    first.tiers.observe_prefill(64, 0.001)  # computing costs next to nothing
    other = OtherRank(second.tiers)
    stand_in: Any = other
    tiers = RankedTiers(first.tiers, stand_in)
    found = [probed(tiers) for _ in range(8)]
    assert found == [0] * 8
    assert PoolAsk.AWAITED not in other.asks[1:], "rank 0 heard of it with the first answer at the latest"
    assert num_asked[0] == num_asked[1] <= 1
    tiers.on_commit(BLOCKS[:3])
    assert all(one.tiers.drain(WAIT_S) for one in both)
    assert tiers.load(KEYS[:3], [9, 10, 11]).result(WAIT_S) == 3
    assert [one.first_byte(9) for one in both] == [0, 10]
    for one in both:
        one.tiers.close()
