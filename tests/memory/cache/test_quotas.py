"""Quotas of owners on the device, against a count of every block after every operation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory.buffers import HashBuffer
from tests.prefix.failing_policy import FailingPolicy

from stemma.memory.cache.lease import Lease
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import EvictionPolicy
from stemma.prefix.hashed import HashIndex
from stemma.prefix.keys import KeySpace, Namespace
from stemma.prefix.radix import RadixIndex

BLOCK = 2
SPACE = KeySpace("model", "layout", BLOCK)
OWNERS = ("ada", "bob", "eve")
"""eve has no quota."""
SPACES = tuple(Namespace(salt=f"{owner}{salt}", owner=owner) for owner in OWNERS for salt in ("", "x"))
PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.sampled_from(SPACES), PROMPTS),
        st.tuples(st.just("start"), st.sampled_from(SPACES), PROMPTS),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("quota"), st.sampled_from(("ada", "bob")), st.integers(0, 6)),
    ),
    max_size=25,
)


def make_cache(kind: str, num_blocks: int) -> PrefixCache:
    clock = iter(range(10**9))
    policy: EvictionPolicy = LRUPolicy()
    if kind == "failing":
        policy = FailingPolicy(policy)
        policy.arm(7)
    index = HashIndex(SPACE, policy) if kind == "hash" else RadixIndex(BLOCK, policy)
    return PrefixCache(HashBuffer(num_blocks, BLOCK), index, SPACE, clock=lambda: float(next(clock)))


def held(cache: PrefixCache) -> dict[str, set[int]]:
    """Every owner's cached blocks, by walking the index."""
    found: dict[str, set[int]] = {owner: set() for owner in OWNERS}
    assert cache.index is not None
    for namespace, _, chain in cache.index.walk():
        found[namespace.owner].update(chain.tolist())
    return found


def start(cache: PrefixCache, namespace: Namespace, ids: list[int]) -> Lease | None:
    lease = cache.reserve(namespace, np.array(ids, dtype=np.int32))
    if lease is not None:
        cache.commit(lease, lease.num_tokens)
    return lease


def end(cache: PrefixCache, lease: Lease) -> None:
    cache.free(lease, lease.num_tokens)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["radix", "hash", "failing"])
@settings(max_examples=60, deadline=None)
@given(num_blocks=st.sampled_from((12, 400)), steps=STEPS)
def test_nobody_holds_too_much_and_nobody_else_pays(kind: str, num_blocks: int, steps) -> None:
    """Only blocks that requests hold may exceed a quota. With room for all, no other owner loses a block."""
    cache = make_cache(kind, num_blocks)
    quotas = {"ada": 3, "bob": 5}
    cache.set_quotas(quotas)
    running: list[tuple[str, Lease]] = []
    for step in steps:
        before, acting = held(cache), None
        if step[0] in ("run", "start"):
            acting = step[1].owner
            lease = start(cache, step[1], step[2])
            if lease is not None:
                running.append((acting, lease))
                if step[0] == "run":
                    end(cache, running.pop()[1])
        elif step[0] == "end" and running:
            acting, lease = running.pop(step[1] % len(running))
            end(cache, lease)
        elif step[0] == "quota":
            acting = step[1]
            quotas[acting] = step[2]
            cache.set_quotas(quotas)
        cache.check()
        after = held(cache)
        for owner, quota in quotas.items():
            in_use = {
                block for name, lease in running if name == owner for block in lease.block_table.tolist()
            }
            assert len(after[owner]) <= max(quota, len(after[owner] & in_use))
        if num_blocks == 400:
            for owner in OWNERS:
                assert owner == acting or after[owner] == before[owner]


def test_the_oldest_of_the_owners_own_blocks_go_first_and_from_the_end() -> None:
    cache = make_cache("radix", 100)
    ada, eve = Namespace("a", owner="ada"), Namespace("e", owner="eve")
    for namespace, ids in ((eve, [9] * 8), (ada, [1] * 4), (ada, [2] * 4)):
        lease = start(cache, namespace, ids)
        assert lease is not None
        end(cache, lease)
    cache.set_quotas({"ada": 3})
    assert cache.match(ada, np.array([2] * 5, dtype=np.int32)) == 4
    assert cache.match(ada, np.array([1] * 5, dtype=np.int32)) == 2
    assert cache.match(eve, np.array([9] * 9, dtype=np.int32)) == 8
    cache.set_quotas({})
    for ids in ([3] * 8, [4] * 8):
        lease = start(cache, ada, ids)
        assert lease is not None
        end(cache, lease)
    assert len(held(cache)["ada"]) == 11
