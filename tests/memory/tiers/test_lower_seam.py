"""PrefixCache above lower tiers: what it demotes, loads, and does when a load fails or is abandoned."""

from __future__ import annotations

import contextlib

import pytest
from tests.memory.cache.served_prompts import NS, buffer_of, compute_all, make_cache, run, tokens
from tests.memory.tiers.dict_tiers import DictTiers

from stemma.prefix.explain import MissReason
from stemma.types import Retention, RetentionHint, RetentionRange, Tier


@pytest.fixture
def tiers() -> DictTiers:
    return DictTiers()


@pytest.fixture
def cache(tiers):
    cache = make_cache(4, 4, lower=tiers)
    tiers.buffer = buffer_of(cache)
    return cache


def push_down(cache) -> None:
    """Fill the device with something else, so that all before it is demoted."""
    run(cache, tokens(range(900, 915)))


def test_committed_and_evicted_blocks_are_announced_with_their_parents(cache, tiers):
    lease = cache.reserve(NS, tokens(range(9)), retention=Retention(RetentionHint(70, 5.0)))
    compute_all(cache, lease)
    keys = [lease.key(0), lease.key(1)]
    root = lease.roots.own
    cache.free(lease, 9)
    assert [b.key for b in tiers.committed[:2]] == keys
    assert [b.parent for b in tiers.committed] == [root, keys[0], keys[1]]
    assert [b.num_tokens for b in tiers.committed] == [4, 4, 1]
    assert {(b.hint.priority, b.hint.ttl_s) for b in tiers.committed} == {(70, 5.0)}
    push_down(cache)
    assert [b.key for b in tiers.evicted[1:3]] == [keys[1], keys[0]]


def test_a_block_has_the_hints_of_the_range_of_its_first_token(cache, tiers):
    given = ((5, 90, 3600.0), (6, 10, 1.0), (9, 60, None))
    ranges = tuple(RetentionRange(end, RetentionHint(priority, ttl_s)) for end, priority, ttl_s in given)
    lease = cache.reserve(NS, tokens(range(13)), retention=Retention(RetentionHint(40, 7.0), ranges))
    compute_all(cache, lease)
    cache.free(lease, 13)
    assert [(b.hint.priority, b.hint.ttl_s) for b in tiers.committed] == [
        (90, 3600.0),
        (90, 3600.0),  # the sixth token's range begins within this block
        (60, None),
        (40, 7.0),
    ]


def test_a_demoted_prefix_is_loaded_and_reported_by_tier(cache, tiers):
    run(cache, tokens(range(12)))
    push_down(cache)
    lease = cache.reserve(NS, tokens(range(12), 50))
    assert lease.pending.tiers == (Tier.HOST,) * 3
    assert lease.num_cached_tokens == 0
    tiers.finish()
    cache.finish_load(lease)
    assert lease.cached_by_tier == {Tier.HOST: 12}
    cache.buffer.verify(lease, 12)
    cache.check()
    assert cache.match(NS, tokens(range(12), 51)) == 12
    compute_all(cache, lease)
    cache.free(lease, 13)
    cache.check()


def test_what_is_on_the_device_is_not_loaded(cache, tiers):
    run(cache, tokens(range(12)))
    push_down(cache)
    first = cache.reserve(NS, tokens(range(5)))
    tiers.finish()
    cache.finish_load(first)
    cache.free(first, 4)
    second = cache.reserve(NS, tokens(range(12), 50))
    assert second.pending.first == 1
    tiers.finish()
    cache.finish_load(second)
    assert second.cached_by_tier == {Tier.DEVICE: 4, Tier.HOST: 8}
    cache.buffer.verify(second, 12)
    cache.free(second, 12)


def test_a_load_that_breaks_off_is_a_smaller_hit(cache, tiers):
    run(cache, tokens(range(12)))
    push_down(cache)
    lease = cache.reserve(NS, tokens(range(12), 50))
    tiers.finish(num_loaded=1)
    cache.finish_load(lease)
    assert lease.miss.reason is MissReason.LOAD_FAILED
    assert lease.cached_by_tier == {Tier.HOST: 4}
    compute_all(cache, lease)
    cache.free(lease, 13)
    cache.check()


def test_an_abandoned_load_keeps_its_blocks_until_it_is_over(cache, tiers):
    run(cache, tokens(range(12)))
    push_down(cache)
    lease = cache.reserve(NS, tokens(range(12), 50))
    cache.free(lease, 0)
    cache.check()
    assert cache.reserve(NS, tokens(700, 701)) is None
    tiers.finish()
    assert cache.reserve(NS, tokens(700, 701)) is not None
    cache.check()


@pytest.mark.parametrize("method", ["on_evict", "on_commit", "on_hit", "match", "load"])
def test_lower_tiers_that_raise_cost_no_block(tiers: DictTiers, method: str) -> None:
    """Whatever breaks below, at another user's admission say: index, allocator and leases still agree."""
    cache = make_cache(num_blocks=6, block_size=4, lower=tiers)
    tiers.buffer = buffer_of(cache)
    run(cache, tokens(range(8)))
    run(cache, tokens(range(50, 58)))

    def broken(*_: object) -> None:
        raise OverflowError("cannot convert float infinity to integer")

    works = getattr(tiers, method)
    setattr(tiers, method, broken)
    for prompt in (tokens(range(8), 99), tokens(range(200, 222)), tokens(range(50, 58), 98)):
        lease = None
        try:
            lease = cache.reserve(NS, prompt)
            if lease is not None and lease.pending is None:
                compute_all(cache, lease)
        except OverflowError:
            pass
        cache.check()
        if lease is not None:
            with contextlib.suppress(OverflowError):
                cache.free(lease, lease.num_tokens if lease.pending is None else 0)
        cache.check()
    setattr(tiers, method, works)
    while tiers.loads:
        tiers.finish()
    cache.flush()
    assert cache.stats().num_free_blocks == 6


@pytest.mark.parametrize(
    ("setting", "reason", "words"),
    [
        ("is_worth_loading", MissReason.LOAD_SLOWER, "predicted to be faster"),
        ("is_awaited", MissReason.LOAD_NOT_AWAITED, "best_effort"),
    ],
)
def test_blocks_that_are_passed_over_are_the_reason(cache, tiers, setting, reason, words):
    run(cache, tokens(range(12)))
    push_down(cache)
    setattr(tiers, setting, False)
    lease = cache.reserve(NS, tokens(range(12), 50))
    assert lease.pending is None
    assert lease.miss.reason is reason
    assert "3 more blocks after position 0 lie in the host tier" in lease.miss.detail
    assert words in lease.miss.detail
    cache.free(lease, 0)
