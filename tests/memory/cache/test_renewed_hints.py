"""Hints that a later request gives to blocks which were cached before it."""

from __future__ import annotations

import pytest
from tests.memory.buffers import HashBuffer
from tests.memory.cache.served_prompts import NS, Clock, compute_all, reserved, run, tokens

from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.hashed import HashIndex
from stemma.prefix.index import PrefixIndex
from stemma.prefix.keys import KeySpace
from stemma.prefix.radix import RadixIndex
from stemma.types import Retention, RetentionHint, RetentionRange

SIZE = 4
FIRST, SECOND, THIRD = (tokens(range(start, start + 4 * SIZE)) for start in (0, 100, 200))
WHOLE = 4 * SIZE - 1
"""All that a match of one of them may give."""
RELEASE = RetentionHint(0, 0.0)


def cache_of(policy: str, kind: str) -> PrefixCache:
    space = KeySpace("model", "layout", SIZE)
    ranked = make_policy(policy)
    index: PrefixIndex = RadixIndex(SIZE, ranked) if kind == "radix" else HashIndex(space, ranked)
    return PrefixCache(HashBuffer(10, SIZE), index, space, clock=Clock())


def use(cache: PrefixCache, prompt: object, retention: Retention) -> None:
    lease = reserved(cache, NS, prompt, retention=retention)  # type: ignore[arg-type]
    compute_all(cache, lease)
    cache.free(lease, lease.num_tokens)


@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize("policy", ["retention", "hazard"])
def test_released_blocks_go_first_although_they_were_used_last(policy: str, kind: str) -> None:
    cache = cache_of(policy, kind)
    run(cache, FIRST)
    run(cache, SECOND)
    use(cache, FIRST, Retention(RELEASE, renews=True))
    run(cache, THIRD)
    assert cache.match(NS, SECOND) == WHOLE
    assert cache.match(NS, FIRST) < 2 * SIZE


@pytest.mark.parametrize("policy", ["retention", "hazard"])
def test_others_hints_stay_unless_they_are_renewed(policy: str) -> None:
    cache = cache_of(policy, "radix")
    run(cache, FIRST)
    run(cache, SECOND)
    use(cache, FIRST, Retention(RELEASE))
    run(cache, THIRD)
    assert cache.match(NS, FIRST) == WHOLE


@pytest.mark.parametrize("policy", ["retention", "hazard"])
def test_a_part_of_a_prompt_may_be_kept(policy: str) -> None:
    cache = cache_of(policy, "radix")
    run(cache, FIRST)
    run(cache, SECOND)
    kept = RetentionRange(2 * SIZE, RetentionHint(100, None))
    use(cache, FIRST, Retention(RELEASE, (kept,), renews=True))
    run(cache, THIRD[: 3 * SIZE])
    assert cache.match(NS, SECOND) == WHOLE
    assert 2 * SIZE <= cache.match(NS, FIRST) < WHOLE
