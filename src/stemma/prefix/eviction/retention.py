"""Retention hints: evicts expired blocks first, then by lowest priority, then LRU.

A time to live counts from the last use. Without hints this is LRU.
An expired block can still be a hit until it is evicted.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from stemma.prefix.eviction.candidates import CandidateHeap
from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.stamped import STAMP_BITS, RankedPolicy, resized
from stemma.types import BlockIds


class RetentionPolicy(RankedPolicy):
    """Evicts by time to live, priority and last use, in this order."""

    name: ClassVar[str] = "retention"

    def __init__(self) -> None:
        super().__init__()
        num_ids = len(self._stamps)
        self._priorities: npt.NDArray[np.int64] = np.zeros(num_ids, dtype=np.int64)
        self._ttls_s: npt.NDArray[np.float64] = np.full(num_ids, math.inf)
        self._expiries_s: npt.NDArray[np.float64] = np.full(num_ids, math.inf)
        self._mortal = CandidateHeap(self._expiry_rank)
        """The candidates that have a time to live, by its end."""

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Store the hints and start the blocks' time to live."""
        self._reserve(block_ids)
        self._hint(block_ids, traits)
        self.access(block_ids, now)

    @override
    def hint(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        self._hint(block_ids, traits)
        self._expiries_s[block_ids] = now + self._ttls_s[block_ids]

    def _hint(self, block_ids: BlockIds, traits: BlockTraits) -> None:
        for run in traits.runs(len(block_ids)):
            hinted, ttl_s = block_ids[run.start : run.end], run.hint.ttl_s
            self._priorities[hinted] = run.hint.priority
            self._ttls_s[hinted] = math.inf if ttl_s is None else ttl_s

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Restart the blocks' time to live."""
        self._stamp(block_ids)
        self._expiries_s[block_ids] = now + self._ttls_s[block_ids]

    @override
    def offer(self, block_id: int) -> None:
        super().offer(block_id)
        if self._expiries_s[block_id] < math.inf:
            self._mortal.offer(block_id)

    @override
    def withdraw(self, block_id: int) -> None:
        super().withdraw(block_id)
        self._mortal.withdraw(block_id)

    def victim(self, now: float) -> int | None:
        """Return an expired candidate, or else the one of lowest priority and oldest use."""
        first = self._mortal.lowest()
        if first is not None and self._expiries_s[first] <= now:
            return first
        return self.lowest()

    @override
    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        super().drop(block_id, now, evicted=evicted)
        self._mortal.withdraw(block_id)

    def _rank(self, block_id: int) -> int:
        return self._priorities.item(block_id) << STAMP_BITS | self._stamps.item(block_id)

    def _expiry_rank(self, block_id: int) -> int:
        # The bits of non-negative floats have the order of the floats.
        bits = self._expiries_s.view(np.int64).item(block_id)
        return bits << STAMP_BITS | self._stamps.item(block_id)

    def _resize(self, num_ids: int) -> None:
        super()._resize(num_ids)
        self._priorities = resized(self._priorities, num_ids)
        self._ttls_s = resized(self._ttls_s, num_ids)
        self._expiries_s = resized(self._expiries_s, num_ids)
