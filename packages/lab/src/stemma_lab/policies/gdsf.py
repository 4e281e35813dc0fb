"""Greedy-Dual-Size-Frequency (Cherkasova 1998): value = uses x cost, aged by the value of what was evicted.

All blocks have the same size, so size cancels. With costs (`BlockTraits.costs_s`) deep blocks, which take
longer to recompute, stay longer; without, each costs 1 and this is LFU with aging counts.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.stamped import STAMP_BITS, RankedPolicy, resized
from stemma.types import BlockIds


class GDSFPolicy(RankedPolicy):
    """Evicts the candidate with the lowest ``inflation at its last use + uses x cost``."""

    name: ClassVar[str] = "gdsf"

    def __init__(self) -> None:
        super().__init__()
        num_ids = len(self._stamps)
        self._counts: npt.NDArray[np.int64] = np.zeros(num_ids, dtype=np.int64)
        self._costs: npt.NDArray[np.float64] = np.zeros(num_ids, dtype=np.float64)
        self._values: npt.NDArray[np.float64] = np.zeros(num_ids, dtype=np.float64)
        # The bits of non-negative floats have the order of the floats.
        self._value_bits = self._values.view(np.int64)
        self._inflation = 0.0
        """The value of the last evicted block: the base value of new blocks."""

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Count the first use."""
        self._reserve(block_ids)
        self._counts[block_ids] = 0
        self._costs[block_ids] = 1.0 if traits.costs_s is None else traits.costs_s
        self.access(block_ids, now)

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Count one more use."""
        self._stamp(block_ids)
        self._counts[block_ids] += 1
        self._values[block_ids] = self._inflation + self._counts[block_ids] * self._costs[block_ids]

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        """Drop the candidate; if it was evicted, its value becomes the base value of new blocks."""
        if evicted:
            self._inflation = max(self._inflation, self._values.item(block_id))
        super().drop(block_id, now, evicted=evicted)

    def _rank(self, block_id: int) -> int:
        return self._value_bits.item(block_id) << STAMP_BITS | self._stamps.item(block_id)

    def _resize(self, num_ids: int) -> None:
        super()._resize(num_ids)
        self._counts = resized(self._counts, num_ids)
        self._costs = resized(self._costs, num_ids)
        self._values = resized(self._values, num_ids)
        self._value_bits = self._values.view(np.int64)
