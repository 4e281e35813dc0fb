"""hazard on traffic of many kinds: it may gain, but never loses more than half a point to LRU."""

from __future__ import annotations

import pytest
from packages.lab.tests.generated import KINDS, Kind, agentic, capacities_of, chat, retimed

from stemma_lab.replay import replay

ALLOWED = 0.005


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_never_worse_than_lru(kind: Kind) -> None:
    trace = kind.make(2)
    losses = {}
    for capacity in capacities_of(trace):
        lru, hazard = replay(trace, "lru", capacity), replay(trace, "hazard", capacity)
        in_blocks = lru.block_hit_ratio(trace) - hazard.block_hit_ratio(trace)
        in_tokens = lru.token_hit_ratio(trace) - hazard.token_hit_ratio(trace)
        losses[capacity] = max(in_blocks, in_tokens)
    assert max(losses.values()) <= ALLOWED, losses


@pytest.mark.parametrize("kind", ["equal", "fast"])
def test_without_time_to_learn_from_it_is_lru(kind: str) -> None:
    """All requests at the same time, or within seconds: exactly LRU, request by request."""
    trace = retimed(chat(1, span_s=600.0, num_sessions=250), kind)
    for capacity in (100, 1500):
        lru, hazard = replay(trace, "lru", capacity), replay(trace, "hazard", capacity)
        assert hazard.num_hit_blocks.tolist() == lru.num_hit_blocks.tolist()


@pytest.mark.slow
def test_gains_where_there_is_something_to_gain() -> None:
    trace = agentic(1, num_sessions=60)
    capacity = trace.num_unique_blocks // 25
    lru, hazard = replay(trace, "lru", capacity), replay(trace, "hazard", capacity)
    assert hazard.block_hit_ratio(trace) > lru.block_hit_ratio(trace) + 0.01
