"""`RecentKeys`: bounded, and O(1) a key also where it is full."""

from __future__ import annotations

import time

from tests.contracts.block_store_suite import key_of

from stemma.memory.tiers.recent_keys import RecentKeys


def test_what_was_noted_longest_ago_is_dropped_first() -> None:
    recent = RecentKeys[int](3)
    recent.note({key_of(n): n for n in range(3)})
    recent.note({key_of(0): 10})  # renewed
    recent.note({key_of(3): 3})
    assert [recent.get(key_of(n), -1) for n in range(4)] == [10, -1, 2, 3]
    assert len(recent) == 3


def test_a_note_costs_the_same_whether_the_table_is_full_or_not() -> None:
    """A dict whose oldest keys were deleted is searched from its beginning: that took 24 us a key."""
    batch = 512
    keys = [[key_of((n, m)) for m in range(batch)] for n in range(96)]
    recent = RecentKeys[int](1 << 14)

    def cost(batches: list[list]) -> float:
        best = float("inf")
        for some in batches:
            start = time.perf_counter()
            recent.note(dict.fromkeys(some, 1))
            best = min(best, time.perf_counter() - start)
        return best

    filling = cost(keys[:32])
    full = cost(keys[32:])
    assert full < 8 * filling
