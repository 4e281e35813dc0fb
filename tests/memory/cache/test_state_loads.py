"""Loads of states: those that come too late for all of a prompt still bring a part of it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.memory.buffers import HashBuffer
from tests.memory.tiers.dict_tiers import DictTiers

from stemma.memory.cache.lease import Lease
from stemma.memory.cache.places import Places
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.cache.states import CachedStates
from stemma.memory.device.slabs import SlabAllocator
from stemma.prefix.explain import MissReason
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace
from stemma.prefix.radix import RadixIndex
from stemma.types import BlockKey, Tier

BLOCK, NUM_BLOCKS = 32, 60
TOKENS = np.arange(300, dtype=np.int32)


@pytest.fixture
def tiers() -> DictTiers:
    return DictTiers()


@pytest.fixture
def cache(tiers: DictTiers) -> PrefixCache:
    """A cache that has a prompt below the device, with states behind every 64 tokens."""
    buffer = tiers.buffer = HashBuffer(NUM_BLOCKS, BLOCK)
    places = Places(SlabAllocator(NUM_BLOCKS, 2), 1, lambda state: range(2 * state, 2 * state + 2))
    states = CachedStates(places, BLOCK, tiers, lambda: 0.0, interval=64)
    space = KeySpace("model", "layout", BLOCK)
    cache = PrefixCache(buffer, RadixIndex(BLOCK), space, lower=tiers, states=states)
    lease = reserved(cache, TOKENS[:260])
    assert cache.plan_state(lease, 0, 260)
    assert cache.land_state(lease, 260, 260)
    cache.free(lease, 260)
    for block in tiers.committed:
        tiers.blocks[block.key] = buffer.data[block.block_id].copy()
    cache.flush()
    return cache


def reserved(cache: PrefixCache, tokens: np.ndarray) -> Lease:
    lease = cache.reserve(DEFAULT_NAMESPACE, tokens)
    assert lease is not None
    return lease


def state_of(cache: PrefixCache, lease: Lease, position: int) -> list[BlockKey]:
    assert cache.states is not None
    return cache.states.piece_keys(lease, position)


def test_all_of_it_arrives(cache: PrefixCache, tiers: DictTiers) -> None:
    lease = reserved(cache, TOKENS)
    assert len(tiers.loads[0][0]) == 8 + 2
    tiers.finish()
    cache.finish_load(lease)
    assert (lease.pending, lease.num_cached_tokens) == (None, 256)
    cache.free(lease, 256)
    cache.check()


def test_a_load_cut_off_goes_on_from_an_earlier_state(cache: PrefixCache, tiers: DictTiers) -> None:
    lease = reserved(cache, TOKENS)
    tiers.finish(5)
    cache.finish_load(lease)
    assert lease.pending is not None
    assert tiers.loads[0][0] == state_of(cache, lease, 128)
    tiers.finish()
    assert lease.has_loaded
    cache.finish_load(lease)
    assert lease.pending is None
    assert lease.cached_by_tier == {Tier.HOST: 128}
    assert lease.state is not None
    assert lease.state.position == 128
    assert lease.miss is not None
    assert lease.miss.reason is MissReason.LOAD_FAILED
    cache.check()
    cache.free(lease, 128)
    cache.check()


def test_a_state_that_comes_late_alone_is_asked_for_once_more(cache: PrefixCache, tiers: DictTiers) -> None:
    lease = reserved(cache, TOKENS)
    tiers.finish(9)
    cache.finish_load(lease)
    assert tiers.loads[0][0] == state_of(cache, lease, 256)
    tiers.finish(1)
    cache.finish_load(lease)
    assert (lease.pending, lease.num_cached_tokens) == (None, 0)
    cache.free(lease, 0)
    cache.check()


def test_a_state_here_is_nearer_than_one_that_is_loaded(cache: PrefixCache, tiers: DictTiers) -> None:
    first = reserved(cache, TOKENS[:150])
    tiers.finish()
    cache.finish_load(first)
    assert first.num_cached_tokens == 128
    lease = reserved(cache, TOKENS)
    tiers.finish(1)
    cache.finish_load(lease)
    assert (lease.pending, lease.num_cached_tokens) == (None, 128)
    for one in (first, lease):
        cache.free(one, 128)
    cache.check()


def test_what_must_be_computed_again_waits_for_no_state(cache: PrefixCache, tiers: DictTiers) -> None:
    """Only the device may be asked, and the state lies below: it is neither loaded nor taken as loaded."""
    lease = reserved(cache, TOKENS)
    tiers.finish()
    cache.finish_load(lease)
    cache.free(lease, 256)
    assert cache.states is not None
    cache.states.flush()
    again = cache.reserve(DEFAULT_NAMESPACE, TOKENS, max_cached=200)
    assert again is not None
    assert (again.pending, again.num_cached_tokens) == (None, 0)
    assert again.state is not None
    assert (again.state.state, again.state.position) == (None, 0)
