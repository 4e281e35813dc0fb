"""Host and disk stores when something inside them raises, and with hints beyond all bounds."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contracts.block_store_suite import BLOCK_BYTES, ROOT, bytes_of, chain, key_of, keys, read
from tests.memory.faulty_files import FaultyFiles
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.small_disks import SPACE, size_for
from tests.prefix.failing_policy import FailingPolicy

from stemma.memory.tiers.block_store import BlockPut, PutResult, ReadResult
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.index import TierIndex
from stemma.memory.tiers.slotted import SlottedStore
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import EvictionPolicy
from stemma.prefix.eviction.registry import POLICIES, make_policy
from stemma.types import RetentionHint

CAPACITY = 6
EXTREME_TTLS_S = (0.0, 1e-300, 1e39, 1.7976931348623157e308, math.inf, math.nan, -1.0, -1e308)

MakeStore = Callable[[EvictionPolicy], SlottedStore]


@pytest.fixture(params=["host", "disk"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    def make(policy: EvictionPolicy) -> SlottedStore:
        if request.param == "host":
            return HostStore(BLOCK_BYTES, CAPACITY * BLOCK_BYTES, policy, ManualClock())
        return DiskStore(tmp_path, SPACE, BLOCK_BYTES, size_for(CAPACITY), policy, ManualClock())

    return make


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_time_to_live_breaks_a_store(make_store: MakeStore, name: str) -> None:
    store = make_store(make_policy(name))
    for n, ttl_s in enumerate((*EXTREME_TTLS_S, *EXTREME_TTLS_S)):
        key = key_of(f"{n}")
        block = BlockPut(
            key, ROOT, memoryview(bytes_of(key)), RetentionHint((-(10**30), 10**30)[n % 2], ttl_s)
        )
        assert store.put_many([block]) == [PutResult.STORED]
        store.check()
    assert store.num_policy_failures == 0
    assert store.num_blocks == CAPACITY
    store.close()


def test_a_huge_time_to_live_means_never_after_a_restart_too(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    (block,) = chain("a", 1)
    forever = BlockPut(block.key, block.parent, block.data, RetentionHint(ttl_s=1e39))
    store = DiskStore(tmp_path, SPACE, BLOCK_BYTES, size_for(CAPACITY), LRUPolicy(), clock, default_ttl_s=5.0)
    store.put_many([forever])
    store.close()
    clock.now += 3e9
    store = DiskStore(tmp_path, SPACE, BLOCK_BYTES, size_for(CAPACITY), LRUPolicy(), clock, default_ttl_s=5.0)
    assert store.expire() == 0
    assert read(store, [block.key]) == [ReadResult.HIT]
    store.close()


@pytest.mark.parametrize("num_calls", range(0, 40, 3))
def test_a_policy_that_raises_costs_no_slot(make_store: MakeStore, num_calls: int) -> None:
    policy = FailingPolicy(LRUPolicy())
    store = make_store(policy)
    policy.arm(num_calls)
    for n in range(8):
        blocks = chain(f"{n}", 3)
        assert store.put_many(blocks) == [PutResult.STORED] * 3
        assert read(store, keys(blocks)) == [ReadResult.HIT] * 3
        store.unpin([k for k, held in zip(keys(blocks), store.pin(keys(blocks)), strict=True) if held])
        store.remove([blocks[-1].key])
        store.check()
    assert store.num_policy_failures == 1
    num_blocks = store.num_blocks
    assert store.clear() == num_blocks
    store.close()  # would wait for ever for bytes that somebody moves


def test_a_copy_that_raises_gives_its_slots_back() -> None:
    store = HostStore(BLOCK_BYTES, CAPACITY * BLOCK_BYTES, LRUPolicy(), ManualClock())

    def broken(at: object, into: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    blocks = chain("a", CAPACITY)
    with pytest.raises(RuntimeError, match="illegal"):
        store.put_from(blocks, broken)
    store.check()
    assert store.num_blocks == 0
    assert store.put_many(blocks) == [PutResult.STORED] * CAPACITY
    store.close()


class _RaisingFiles(FaultyFiles):
    """Raises what no disk raises."""

    raises = False

    def read(self, *arguments: object, **options: object) -> int:
        if self.raises:
            raise TypeError("a bug")
        return super().read(*arguments, **options)  # type: ignore[arg-type]

    def write(self, *arguments: object, **options: object) -> None:
        if self.raises:
            raise TypeError("a bug")
        super().write(*arguments, **options)  # type: ignore[arg-type]


def test_a_bug_in_a_read_or_a_write_leaves_a_disk_usable(tmp_path: Path) -> None:
    files = _RaisingFiles()
    clock = ManualClock()
    store = DiskStore(tmp_path, SPACE, BLOCK_BYTES, size_for(CAPACITY), LRUPolicy(), clock, files=files)
    blocks = chain("a", CAPACITY)
    store.put_many(blocks[:3])
    files.raises = True
    for act in (lambda: read(store, keys(blocks[:3])), store.verify, lambda: store.put_many(blocks[3:])):
        with pytest.raises(TypeError):
            act()
        store.check()
    files.raises = False
    assert store.put_many(blocks[3:]) == [PutResult.STORED] * 3
    assert read(store, keys(blocks)) == [ReadResult.HIT] * CAPACITY
    assert store.clear() == CAPACITY  # nothing stayed pinned
    store.close()


def host(capacity: int, clock: ManualClock) -> HostStore:
    return HostStore(BLOCK_BYTES, capacity * BLOCK_BYTES, LRUPolicy(), clock)


def short_lived(name: str, length: int) -> list[BlockPut]:
    """Return a chain of blocks that expire after 5 seconds."""
    return [replace(block, hint=RetentionHint(ttl_s=5.0)) for block in chain(name, length)]


@pytest.mark.parametrize("order", [1, -1])
def test_a_long_chain_expires_in_time_that_grows_with_its_length(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether children lie in higher or in lower slots than their parents."""
    length, clock, num_looks = 1000, ManualClock(), 0
    store = host(length, clock)
    for block in short_lived("a", length)[::order]:
        store.put_many([block])
    is_leaf = TierIndex.is_leaf

    def counted(index: TierIndex, slot: int) -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_leaf(index, slot)

    monkeypatch.setattr(TierIndex, "is_leaf", counted)
    clock.now = 6.0
    assert store.expire() == length
    assert num_looks <= 2 * length
    assert store.num_blocks == 0
    store.check()


def test_others_get_the_lock_while_many_blocks_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    length, clock = 2000, ManualClock()
    store = host(length, clock)
    for block in short_lived("a", length):
        store.put_many([block])
    drop, num_dropped, seen = TierIndex.drop, 0, []

    def touch() -> None:
        store.touch([])
        seen.append(num_dropped)

    touching = threading.Thread(target=touch)

    def counted(index: TierIndex, slot: int, now: float) -> None:
        nonlocal num_dropped
        if num_dropped == 0:
            touching.start()
        num_dropped += 1
        drop(index, slot, now)

    monkeypatch.setattr(TierIndex, "drop", counted)
    clock.now = 6.0
    assert store.expire() == length
    touching.join()
    assert seen[0] < length


def test_what_is_used_between_two_slices_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    length, clock = 600, ManualClock()
    store = host(length, clock)
    blocks = short_lived("a", length)
    for block in blocks:
        store.put_many([block])
    used = keys(blocks)[:10]
    monkeypatch.setattr("stemma.memory.tiers.slotted.time.sleep", lambda _: store.touch(used))
    clock.now = 6.0
    assert store.expire() == length - 10
    assert store.exists_many(used) == [True] * 10
    store.check()


def test_a_clock_that_is_set_back_is_followed() -> None:
    """A write while it is ahead disables no limit once it is right."""
    clock = ManualClock(1e9)
    store = host(8, clock)
    store.put_many(short_lived("ahead", 2))
    clock.now = 1000.0
    store.put_many(short_lived("right", 2))
    assert store.expire() == 0
    clock.now = 1006.0
    assert store.expire() == 4
    store.check()


def test_what_a_clock_ahead_wrote_expires_after_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(1e9)

    def disk() -> DiskStore:
        size = size_for(CAPACITY)
        return DiskStore(tmp_path, SPACE, BLOCK_BYTES, size, LRUPolicy(), clock, default_ttl_s=5.0)

    store = disk()
    store.put_many(chain("a", 2))
    store.close()
    clock.now = 1000.0
    store = disk()
    assert store.num_blocks == 2
    clock.now = 1006.0
    assert store.expire() == 2
    store.close()
