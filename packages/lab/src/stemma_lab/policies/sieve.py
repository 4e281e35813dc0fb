"""SIEVE (Zhang et al., NSDI 2024): a queue in order of entry, a hand, and one bit per block.

A use sets the bit. To evict, the hand moves from older to newer blocks, clears set bits, and takes the first
block whose bit isn't set; after the newest it starts again at the oldest. Blocks never move. Only candidates
can be taken, so the hand skips the others.

Here a block's position is its stamp, and its *lap* is the round in which the hand reaches it, so the victim
is the candidate of lowest (lap, stamp).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.stamped import STAMP_BITS, RankedPolicy, resized
from stemma.types import BlockIds


class SievePolicy(RankedPolicy):
    """Evicts the first candidate ahead of the hand that wasn't used since the hand last passed it."""

    name: ClassVar[str] = "sieve"

    def __init__(self) -> None:
        super().__init__()
        num_ids = len(self._stamps)
        self._visited: npt.NDArray[np.bool_] = np.zeros(num_ids, dtype=np.bool_)
        self._laps: npt.NDArray[np.int64] = np.zeros(num_ids, dtype=np.int64)
        self._hand = 0
        """Rank of the block that the hand is at."""

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Append the blocks to the queue."""
        self._reserve(block_ids)
        self._stamp(block_ids)
        self._visited[block_ids] = False

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Set the blocks' bits."""
        self._visited[block_ids] = True

    def offer(self, block_id: int) -> None:
        """Make the block a candidate; if the hand has passed its position, it belongs to the next lap."""
        lap = self._hand >> STAMP_BITS
        self._laps[block_id] = lap
        if self._rank(block_id) < self._hand:
            self._laps[block_id] = lap + 1
        super().offer(block_id)

    def victim(self, now: float) -> int | None:
        """Move the hand to the next candidate whose bit isn't set."""
        while (block_id := self.lowest()) is not None:
            self._hand = self._rank(block_id)
            if not self._visited[block_id]:
                return block_id
            self._visited[block_id] = False
            self._laps[block_id] += 1
        return None

    def _rank(self, block_id: int) -> int:
        return self._laps.item(block_id) << STAMP_BITS | self._stamps.item(block_id)

    def _resize(self, num_ids: int) -> None:
        super()._resize(num_ids)
        self._visited = resized(self._visited, num_ids)
        self._laps = resized(self._laps, num_ids)
