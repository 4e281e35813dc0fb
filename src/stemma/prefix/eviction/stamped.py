"""Base classes of most policies: a logical clock, one stamp per block, and a heap of candidates by rank."""

from __future__ import annotations

from abc import abstractmethod
from heapq import heappop
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.candidates import ID_BITS, ID_MASK, CandidateHeap
from stemma.prefix.eviction.policy import EvictionPolicy
from stemma.types import BlockIds

Scalar = TypeVar("Scalar", bound=np.generic)

STAMP_BITS = 64
"""``rank << STAMP_BITS | stamp`` ranks by `rank` and, if equal, by age."""


def resized(array: npt.NDArray[Scalar], size: int) -> npt.NDArray[Scalar]:
    """Return a copy of `array` with zeros up to `size` entries."""
    larger = np.zeros(size, dtype=array.dtype)
    larger[: len(array)] = array
    return larger


class StampedPolicy(EvictionPolicy):
    """Records when each block was stamped last, on a clock that ticks once per block.

    Stamps are unique. Of the blocks of one call the deepest gets the lowest stamp: it is evicted first. So
    the order is total: two indexes that see the same calls evict the same blocks.
    """

    def __init__(self) -> None:
        self._stamps: npt.NDArray[np.int64] = np.zeros(1024, dtype=np.int64)
        self._clock = 0

    def _reserve(self, block_ids: BlockIds) -> None:
        """Make room for blocks that enter."""
        highest = int(block_ids.max())
        if highest >= len(self._stamps):
            self._resize(2 * (highest + 1))

    def _resize(self, num_ids: int) -> None:
        """Give every array room for `num_ids` ids; a subclass with arrays of its own extends this."""
        self._stamps = resized(self._stamps, num_ids)

    def _stamp(self, block_ids: BlockIds) -> None:
        end = self._clock + len(block_ids)
        self._stamps[block_ids] = np.arange(end, self._clock, -1)
        self._clock = end


class RankedPolicy(CandidateHeap, StampedPolicy):
    """Evicts the candidate of lowest rank. See `CandidateHeap` for what ranks may be."""

    def __init__(self) -> None:
        CandidateHeap.__init__(self, self._rank)
        StampedPolicy.__init__(self)

    @abstractmethod
    def _rank(self, block_id: int) -> int:
        """Return the rank of a block that was inserted."""

    def victim(self, now: float) -> int | None:
        """Return the candidate of lowest rank."""
        heap = self._heap
        if heap:
            # Nearly always the top of the heap is live and its rank is unchanged.
            entry = heap[0]
            block_id = entry & ID_MASK
            if self._entry.get(block_id) == entry == self._rank_of(block_id) << ID_BITS | block_id:
                return block_id
        return self.lowest()

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        """Drop the candidate (without a call of `withdraw`, mostly)."""
        heap = self._heap
        if heap and heap[0] & ID_MASK == block_id:
            heappop(heap)
            self._entry.pop(block_id, None)
        else:
            self.withdraw(block_id)
