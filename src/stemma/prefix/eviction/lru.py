"""Least recently used. Blocks used at once age from the end of the chain: the deepest goes first."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from stemma.prefix.eviction.candidates import CandidateHeap
from stemma.prefix.eviction.policy import BlockTraits, EvictionPolicy
from stemma.types import BlockIds


class LRUPolicy(EvictionPolicy):
    """Evicts the candidate whose last use is longest ago.

    Each use of a block gets a stamp of its own from a counter, and within one call deeper blocks get lower
    stamps. So the order is total: two indexes that see the same calls evict the same blocks.
    """

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._stamps = np.zeros(1024, dtype=np.int64)
        self._clock = 0
        self._candidates = CandidateHeap(self._stamps.item)

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Stamp the blocks as used."""
        try:
            self.access(block_ids, now)
        except IndexError:
            grown = np.zeros(2 * (int(block_ids.max()) + 1), dtype=np.int64)
            grown[: len(self._stamps)] = self._stamps
            self._stamps = grown
            self._candidates.rank_by(grown.item)
            self.access(block_ids, now)

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Stamp the blocks as used."""
        end = self._clock + len(block_ids)
        self._stamps[block_ids] = np.arange(end, self._clock, -1)
        self._clock = end

    def offer(self, block_id: int) -> None:
        """Make the block a candidate."""
        self._candidates.offer(block_id)

    def withdraw(self, block_id: int) -> None:
        """Take the candidate back."""
        self._candidates.withdraw(block_id)

    def victim(self, now: float) -> int | None:
        """Return the candidate used longest ago."""
        return self._candidates.lowest()

    def forget(self, block_id: int, now: float, *, evicted: bool) -> None:
        """Drop the candidate."""
        self._candidates.withdraw(block_id)
