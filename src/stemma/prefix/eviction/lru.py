"""Least recently used. Of the blocks of one use, the deepest is evicted first."""

from __future__ import annotations

from typing import ClassVar

from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.stamped import RankedPolicy
from stemma.types import BlockIds


class LRUPolicy(RankedPolicy):
    """Evicts the candidate whose last use is longest ago."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        super().__init__()
        # Looks stamps up without a call of Python code.
        self._rank_of = self._stamps.item

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Stamp the blocks as used."""
        self._reserve(block_ids)
        self._stamp(block_ids)

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Stamp the blocks as used."""
        self._stamp(block_ids)

    def _rank(self, block_id: int) -> int:
        return self._stamps.item(block_id)

    def _resize(self, num_ids: int) -> None:
        super()._resize(num_ids)
        self._rank_of = self._stamps.item
