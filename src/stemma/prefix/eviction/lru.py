"""Least recently used. Blocks used at once age from the end of the chain: the deepest goes first."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.ranked import RankedPolicy
from stemma.types import BlockIds


class LRUPolicy(RankedPolicy):
    """Evicts the candidate whose last use is longest ago.

    Each use of a block gets a stamp of its own from a counter, and within one call deeper blocks get lower
    stamps. So the order is total: two indexes that see the same calls evict the same blocks.
    """

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._stamps = np.zeros(1024, dtype=np.int64)
        self._clock = 0
        super().__init__(self._stamps.item)

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Stamp the blocks as used."""
        try:
            self.access(block_ids, now)
        except IndexError:
            grown = np.zeros(2 * (int(block_ids.max()) + 1), dtype=np.int64)
            grown[: len(self._stamps)] = self._stamps
            self._stamps = grown
            self._rank_of = grown.item
            self.access(block_ids, now)

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Stamp the blocks as used."""
        end = self._clock + len(block_ids)
        self._stamps[block_ids] = np.arange(end, self._clock, -1)
        self._clock = end
