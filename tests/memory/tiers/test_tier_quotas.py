"""Quotas below the device: host and disk against a count of every block, a pool by what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contracts.block_store_suite import BLOCK_BYTES, chain, key_of, keys, read
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.small_disks import SPACE, size_for
from tests.prefix.failing_policy import FailingPolicy

from stemma.memory.tiers.block_store import BlockPut, PutResult, ReadResult
from stemma.memory.tiers.device_block import BlockNotes
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.pool.shares import OwnerShares
from stemma.memory.tiers.slotted import SlottedStore
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import EvictionPolicy
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.keys import owner_tag
from stemma.types import BlockKey, RetentionHint

OWNERS = tuple(owner_tag(name) for name in ("ada", "bob", ""))
"""The last is nobody, without a quota."""
CAPACITY = 16

Make = Callable[[EvictionPolicy], SlottedStore]


def make_host(policy: EvictionPolicy) -> SlottedStore:
    clock = iter(range(10**9))
    return HostStore(BLOCK_BYTES, CAPACITY * BLOCK_BYTES, policy, lambda: float(next(clock)))


def owned(name: str, length: int, owner: str) -> list[BlockPut]:
    return [replace(block, owner=owner) for block in chain(f"{owner}{name}", length)]


def held(store: SlottedStore) -> dict[str, int]:
    every = [block for owner in OWNERS for name in "abc" for block in owned(name, 5, owner)]
    there = store.exists_many(keys(every))
    return {o: sum(t for b, t in zip(every, there, strict=True) if b.owner == o) for o in OWNERS}


puts = st.tuples(st.just("put"), st.sampled_from(OWNERS), st.sampled_from("abc"), st.integers(1, 5))
steps = st.lists(
    st.one_of(
        puts,
        st.tuples(st.just("read"), st.sampled_from(OWNERS), st.sampled_from("abc"), st.integers(1, 5)),
        st.tuples(st.just("quota"), st.sampled_from(OWNERS[:2]), st.just(""), st.integers(0, 6)),
    ),
    max_size=20,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=steps, kind=st.sampled_from(["lru", "hazard", "failing"]))
def test_nobody_holds_more_than_the_quota_and_nobody_else_pays(steps: list, kind: str) -> None:
    """Within the capacity no owner loses a block to another's quota."""
    policy: EvictionPolicy = LRUPolicy() if kind == "failing" else make_policy(kind)
    if kind == "failing":
        policy = FailingPolicy(policy)
        policy.arm(5)
    store = make_host(policy)
    quotas = {OWNERS[0]: 3, OWNERS[1]: 6}
    store.set_quotas(quotas)
    for step, owner, name, number in steps:
        before = held(store)
        if step == "quota":
            quotas[owner] = number
            store.set_quotas(quotas)
        elif step == "put":
            store.put_many(owned(name, number, owner))
        else:
            read(store, keys(owned(name, number, owner)))
        store.check()
        after = held(store)
        for other in OWNERS:
            assert after[other] <= quotas.get(other, CAPACITY)
            if other != owner and sum(before.values()) + number <= CAPACITY:
                assert after[other] == before[other]


def test_what_is_read_or_pinned_goes_later(tmp_path: Path) -> None:
    ada = OWNERS[0]
    store = DiskStore(tmp_path, SPACE, BLOCK_BYTES, size_for(CAPACITY), LRUPolicy(), ManualClock())
    blocks = owned("a", 4, ada)
    store.put_many(blocks)
    store.pin(keys(blocks))
    store.set_quotas({ada: 1})
    assert store.num_blocks == 4
    store.unpin(keys(blocks))
    assert store.put_many(owned("b", 1, ada)) == [PutResult.STORED]
    assert store.num_blocks == 1
    store.set_quotas({})
    store.put_many(owned("c", 5, ada))
    assert store.num_blocks == 6
    store.close()


def test_blocks_keep_their_owner_on_the_way_to_the_disk(tmp_path: Path) -> None:
    ada = OWNERS[0]
    host = make_host(LRUPolicy())
    disk = DiskStore(tmp_path, SPACE, BLOCK_BYTES, size_for(CAPACITY), LRUPolicy(), ManualClock())
    host.put_many(owned("a", 3, ada))
    assert isinstance(host, HostStore)

    def save(blocks: Sequence[BlockPut]) -> None:
        disk.put_many(blocks)

    assert host.drop_oldest(3, save) == 3
    assert read(disk, keys(owned("a", 3, ada))) == [ReadResult.HIT] * 3
    disk.set_quotas({ada: 1})
    assert disk.num_blocks == 1
    disk.close()


def test_blocks_keep_their_hints_on_the_way_to_the_disk_and_over_a_restart(tmp_path: Path) -> None:
    host, clock = make_host(LRUPolicy()), ManualClock()
    assert isinstance(host, HostStore)

    def opened() -> DiskStore:
        return DiskStore(tmp_path, SPACE, BLOCK_BYTES, size_for(CAPACITY), make_policy("retention"), clock)

    def save(blocks: Sequence[BlockPut]) -> None:
        disk.put_many(blocks)

    disk, hint = opened(), RetentionHint(90, ttl_s=1000.0)
    firm = [replace(block, hint=hint, session=7) for block in chain("firm", 3)]
    host.put_many(firm)
    host.drop_oldest(3, save)
    assert disk.notes_many(keys(firm)) == [BlockNotes(hint, 7)] * 3
    disk.close()
    disk = opened()
    assert disk.notes_many(keys(firm)) == [BlockNotes(hint, 7)] * 3
    for number in range(2 * CAPACITY):
        clock.now += 1.0
        disk.put_many(chain(f"weak {number}", 1))
    assert all(disk.exists_many(keys(firm))), "their priority outlives a restart"
    clock.now += 2000.0
    assert disk.expire() == 3
    disk.close()


def test_what_has_expired_in_the_host_tier_does_not_reach_the_disk(tmp_path: Path) -> None:
    clock, saved = ManualClock(), list[BlockKey]()
    host = HostStore(BLOCK_BYTES, CAPACITY * BLOCK_BYTES, LRUPolicy(), clock)
    host.put_many([replace(block, hint=RetentionHint(ttl_s=5.0)) for block in chain("mortal", 2)])
    clock.now += 10.0
    host.put_many(chain("lasting", 2))
    assert host.drop_oldest(4, lambda blocks: saved.extend(keys(list(blocks)))) == 4
    assert sorted(saved) == sorted(keys(chain("lasting", 2)))


def test_shares_of_a_pool() -> None:
    ada, bob, _ = OWNERS
    shares = OwnerShares()
    assert shares.written(owned("a", 9, ada)) == []
    assert shares.set_quotas({ada: 3, bob: 2}) == []
    first, second = owned("a", 3, ada), owned("b", 2, ada)
    assert shares.num_blocks(ada) == 0  # from before there was a quota
    assert shares.written(first) == []
    shares.touch(keys(first[:1]))
    assert shares.written(second) == [first[2].key, first[1].key]
    assert shares.written(first[:1]) == []
    assert shares.written(owned("c", 9, bob)) == [block.key for block in owned("c", 9, bob)[:1:-1]]
    assert shares.written(owned("x", 5, "")) == []
    assert shares.num_blocks(ada) == 3
    removed = shares.set_quotas({ada: 1})
    assert len(removed) == 2
    assert shares.num_blocks(ada) == 1
    assert shares.set_quotas({ada: 0}) != []
    assert shares.num_blocks(ada) == shares.num_blocks(bob) == 0
    assert key_of("nothing") not in removed
