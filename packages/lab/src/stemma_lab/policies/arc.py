"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003).

Two LRU lists, *recent* (blocks used once) and *frequent* (used again), and the ghosts of each. A ghost of the
recent list that returns says that list was too short, so its target grows; a ghost of the frequent list
shrinks it. A block that returns enters the frequent list.

Differences from the paper: a policy isn't told the capacity, so the number of blocks present stands for it;
and eviction happens before the new blocks are known, so the target changes after the eviction, not before it.
Without fingerprints there are no ghosts, and the recent list is always emptied first.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.candidates import CandidateHeap
from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.stamped import StampedPolicy, resized
from stemma.types import BlockIds
from stemma_lab.policies.ghosts import GhostQueue


class ARCPolicy(StampedPolicy):
    """Evicts the least recent of the list that is over its target."""

    name: ClassVar[str] = "arc"

    def __init__(self) -> None:
        super().__init__()
        num_ids = len(self._stamps)
        self._is_frequent: npt.NDArray[np.bool_] = np.zeros(num_ids, dtype=np.bool_)
        self._fingerprints: npt.NDArray[np.uint64] = np.zeros(num_ids, dtype=np.uint64)
        """0: unknown."""
        self._recent = CandidateHeap(self._rank)
        self._frequent = CandidateHeap(self._rank)
        self._recent_ghosts = GhostQueue()
        self._frequent_ghosts = GhostQueue()
        self._num_recent = 0
        self._num_frequent = 0
        self._target_recent = 0.0

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Enter new blocks in the recent list, recently evicted ones in the frequent list."""
        self._reserve(block_ids)
        self._stamp(block_ids)
        self._is_frequent[block_ids] = False
        self._num_recent += len(block_ids)
        if traits.fingerprints is None:
            self._fingerprints[block_ids] = 0
            return
        self._fingerprints[block_ids] = traits.fingerprints
        for block_id, fingerprint in zip(block_ids.tolist(), traits.fingerprints.tolist(), strict=True):
            if self._returns(fingerprint):
                self._is_frequent[block_id] = True
                self._num_recent -= 1
                self._num_frequent += 1

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Move the blocks to the end of the frequent list."""
        self._stamp(block_ids)
        moved = block_ids[~self._is_frequent[block_ids]]
        if not len(moved):
            return
        self._is_frequent[moved] = True
        self._num_recent -= len(moved)
        self._num_frequent += len(moved)
        for block_id in moved.tolist():
            if block_id in self._recent:
                self._recent.withdraw(block_id)
                self._frequent.offer(block_id)

    def offer(self, block_id: int) -> None:
        """Make the block a candidate."""
        self._list_of(block_id).offer(block_id)

    def withdraw(self, block_id: int) -> None:
        """Withdraw the candidate."""
        self._list_of(block_id).withdraw(block_id)

    def victim(self, now: float) -> int | None:
        """Return the least recent candidate of the list that is over its target."""
        if len(self._recent) and (self._num_recent > self._target_recent or not len(self._frequent)):
            return self._recent.lowest()
        return self._frequent.lowest()

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        """Drop the block; remember it if it was evicted."""
        self.withdraw(block_id)
        capacity = self._num_recent + self._num_frequent
        was_frequent = bool(self._is_frequent[block_id])
        if was_frequent:
            self._num_frequent -= 1
        else:
            self._num_recent -= 1
        fingerprint = self._fingerprints.item(block_id)
        if not evicted or not fingerprint:
            return
        if was_frequent:
            self._frequent_ghosts.remember(fingerprint, capacity - len(self._recent_ghosts))
        else:
            self._recent_ghosts.remember(fingerprint, capacity - self._num_recent)

    def _returns(self, fingerprint: int) -> bool:
        """Return whether the block was recently evicted; adapt the target accordingly."""
        num_recent, num_frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if fingerprint in self._recent_ghosts:
            self._recent_ghosts.recall(fingerprint)
            capacity = self._num_recent + self._num_frequent
            self._target_recent = min(self._target_recent + max(1.0, num_frequent / num_recent), capacity)
            return True
        if fingerprint in self._frequent_ghosts:
            self._frequent_ghosts.recall(fingerprint)
            self._target_recent = max(self._target_recent - max(1.0, num_recent / num_frequent), 0.0)
            return True
        return False

    def _list_of(self, block_id: int) -> CandidateHeap:
        return self._frequent if self._is_frequent[block_id] else self._recent

    def _rank(self, block_id: int) -> int:
        return self._stamps.item(block_id)

    def _resize(self, num_ids: int) -> None:
        super()._resize(num_ids)
        self._is_frequent = resized(self._is_frequent, num_ids)
        self._fingerprints = resized(self._fingerprints, num_ids)
