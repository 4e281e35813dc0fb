"""RankedPolicy: the base of every policy that ranks each block by a number of its own.

Ranks are ints (unbounded, so that several criteria can be packed into one), and the lowest goes first.
Candidates are kept in a heap with lazy deletion. A heap entry is ``rank << 32 | block_id``: one int compares
faster than a tuple. Entries of withdrawn blocks stay in the heap until they reach its top or outnumber the
live ones, whichever comes first; so every method is amortised O(log n), and memory is O(candidates).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from stemma.prefix.eviction.policy import EvictionPolicy

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_MIN_STALE = 64


class RankedPolicy(EvictionPolicy):
    """Evicts the candidate of lowest rank. While a block is a candidate its rank may only *grow*
    (a use makes a block more worth keeping); after anything else, `offer` it again."""

    def __init__(self, rank_of: Callable[[int], int]) -> None:
        self._rank_of = rank_of
        """Rank of a block that was inserted. Subclasses may replace it when they grow their arrays."""
        self._heap: list[int] = []
        self._entry: dict[int, int] = {}
        """Candidate -> its entry in the heap."""

    def offer(self, block_id: int) -> None:
        """Make the block a candidate."""
        entry = self._rank_of(block_id) << _ID_BITS | block_id
        self._entry[block_id] = entry
        heappush(self._heap, entry)

    def withdraw(self, block_id: int) -> None:
        """Take the candidate back."""
        live, heap = self._entry, self._heap
        live.pop(block_id, None)
        if len(heap) > 2 * len(live) + _MIN_STALE:
            self._heap = list(live.values())
            heapify(self._heap)

    def victim(self, now: float) -> int | None:
        """Return the candidate of lowest rank, or None."""
        heap, live = self._heap, self._entry
        while heap:
            entry = heap[0]
            block_id = entry & _ID_MASK
            if live.get(block_id) != entry:
                heappop(heap)
                continue
            current = self._rank_of(block_id) << _ID_BITS | block_id
            if current == entry:
                return block_id
            live[block_id] = current
            heapreplace(heap, current)
        return None

    def forget(self, block_id: int, now: float, *, evicted: bool) -> None:
        """Drop the candidate."""
        heap = self._heap
        if heap and heap[0] & _ID_MASK == block_id:
            heappop(heap)
            self._entry.pop(block_id, None)
        else:
            self.withdraw(block_id)
