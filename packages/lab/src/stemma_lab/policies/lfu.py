"""Least frequently used, counted since the block entered; ties: least recently used first."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.stamped import STAMP_BITS, RankedPolicy, resized
from stemma.types import BlockIds


class LFUPolicy(RankedPolicy):
    """Evicts the candidate used least often."""

    name: ClassVar[str] = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._counts: npt.NDArray[np.int64] = np.zeros(len(self._stamps), dtype=np.int64)

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Count the first use."""
        self._reserve(block_ids)
        self._stamp(block_ids)
        self._counts[block_ids] = 1

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Count one more use."""
        self._stamp(block_ids)
        self._counts[block_ids] += 1

    def _rank(self, block_id: int) -> int:
        return self._counts.item(block_id) << STAMP_BITS | self._stamps.item(block_id)

    def _resize(self, num_ids: int) -> None:
        super()._resize(num_ids)
        self._counts = resized(self._counts, num_ids)
