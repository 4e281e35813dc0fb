"""CandidateHeap: eviction candidates by rank, with lazy deletion.

Ranks are ints (unbounded, so that several criteria can be packed into one); the lowest is evicted first. A
heap entry is ``rank << 32 | block_id``: one int compares faster than a tuple. Entries of withdrawn blocks
stay in the heap until they reach its top or outnumber the live ones. So every method is amortised O(log n),
and memory is O(candidates).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

ID_BITS = 32
ID_MASK = (1 << ID_BITS) - 1
_MIN_STALE = 64


class CandidateHeap:
    """Blocks by rank. While a block is in the heap its rank may only *grow* (a use makes it more worth
    keeping); `offer` it again if its rank fell."""

    def __init__(self, rank_of: Callable[[int], int]) -> None:
        self._rank_of = rank_of
        self._heap: list[int] = []
        self._entry: dict[int, int] = {}
        """Candidate -> its entry in the heap."""

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entry

    def offer(self, block_id: int) -> None:
        """Make the block a candidate."""
        entry = self._rank_of(block_id) << ID_BITS | block_id
        self._entry[block_id] = entry
        heappush(self._heap, entry)

    def withdraw(self, block_id: int) -> None:
        """Withdraw the candidate; do nothing if it isn't one."""
        heap, live = self._heap, self._entry
        if live.pop(block_id, None) is None:
            return
        if heap[0] & ID_MASK == block_id:
            heappop(heap)
        elif len(heap) > 2 * len(live) + _MIN_STALE:
            self._heap = list(live.values())
            heapify(self._heap)

    def lowest(self) -> int | None:
        """Return the candidate of lowest current rank, or None."""
        heap, live = self._heap, self._entry
        while heap:
            entry = heap[0]
            block_id = entry & ID_MASK
            if live.get(block_id) != entry:
                heappop(heap)
                continue
            current = self._rank_of(block_id) << ID_BITS | block_id
            if current == entry:
                return block_id
            live[block_id] = current
            heapreplace(heap, current)
        return None
