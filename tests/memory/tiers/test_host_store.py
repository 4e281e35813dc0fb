from __future__ import annotations

from pathlib import Path

import pytest
from tests.contracts.block_store_suite import (
    BLOCK_BYTES,
    ROOT,
    LocalStoreContract,
    bytes_of,
    chain,
    key_of,
    keys,
)
from tests.memory.manual_clock import ManualClock

from stemma.errors import ConfigError
from stemma.memory.tiers.block_store import BlockPut, PutResult, ReadResult
from stemma.memory.tiers.host_store import HostStore
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.types import RetentionHint


def make_host(capacity_bytes: int, clock: ManualClock | None = None) -> HostStore:
    return HostStore(BLOCK_BYTES, capacity_bytes, LRUPolicy(), clock or ManualClock())


class TestHostStore(LocalStoreContract):
    def make_store(self, tmp_path: Path, capacity_blocks: int) -> HostStore:
        return make_host(capacity_blocks * BLOCK_BYTES)


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="one block"):
        make_host(BLOCK_BYTES - 1)


def test_the_arena_stays_within_its_budget() -> None:
    store = make_host(3 * BLOCK_BYTES + BLOCK_BYTES // 2)
    assert store.capacity_blocks == 3
    assert store.memory.nbytes <= 3 * BLOCK_BYTES + BLOCK_BYTES // 2


def test_a_borrowed_view_is_not_evicted_until_it_is_unpinned() -> None:
    store = make_host(2 * BLOCK_BYTES)
    block = chain("a", 1)[0]
    store.put_many([block])
    views = store.borrow([block.key, key_of("absent")])
    assert views[1] is None
    store.put_many(chain("b", 2))
    assert views[0] is not None
    assert bytes(views[0].numpy()) == bytes_of(block.key)
    store.unpin([block.key])
    store.put_many(chain("c", 2))
    assert store.exists_many([block.key]) == [False]
    store.check()


def test_unused_blocks_expire_leaves_first() -> None:
    clock = ManualClock()
    store = make_host(8 * BLOCK_BYTES, clock)
    blocks = [BlockPut(b.key, b.parent, b.data, RetentionHint(ttl_s=10.0)) for b in chain("a", 3)]
    store.put_many(blocks)
    clock.now = 6.0
    assert store.get_many([blocks[0].key], [memoryview(bytearray(BLOCK_BYTES))]) == [ReadResult.HIT]
    clock.now = 12.0
    assert store.exists_many(keys(blocks)) == [True, False, False]
    assert store.expire() == 2
    assert store.num_blocks == 1
    assert store.counters.num_expired == 2
    store.check()


def test_a_parent_outlives_its_unexpired_child() -> None:
    clock = ManualClock()
    store = make_host(8 * BLOCK_BYTES, clock)
    parent, child = chain("a", 2)
    store.put_many([BlockPut(parent.key, ROOT, parent.data, RetentionHint(ttl_s=1.0)), child])
    clock.now = 5.0
    assert store.expire() == 0
    store.remove([child.key])
    assert store.expire() == 1


def test_put_again_of_an_expired_block_before_the_sweep() -> None:
    """An expired block that is still in its slot must not make the tier refuse fresh bytes for good."""
    clock = ManualClock()
    store = make_host(4 * BLOCK_BYTES, clock)
    block = chain("a", 1)[0]
    limited = BlockPut(block.key, ROOT, block.data, RetentionHint(ttl_s=1.0))
    store.put_many([limited])
    clock.now = 5.0
    assert store.put_many([limited]) == [PutResult.EXISTS]
    assert store.exists_many([block.key]) == [True]
