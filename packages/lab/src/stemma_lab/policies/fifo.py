"""First in, first out: uses don't matter. A baseline with the least bookkeeping."""

from __future__ import annotations

from typing import ClassVar

from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.stamped import RankedPolicy
from stemma.types import BlockIds


class FIFOPolicy(RankedPolicy):
    """Evicts the candidate that entered first; of one insert, the deepest."""

    name: ClassVar[str] = "fifo"

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Stamp the blocks."""
        self._reserve(block_ids)
        self._stamp(block_ids)

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Do nothing: the order is that of entry."""

    def _rank(self, block_id: int) -> int:
        return self._stamps.item(block_id)
