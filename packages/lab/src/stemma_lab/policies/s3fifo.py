"""S3-FIFO (Yang et al., SOSP 2023): a small queue that filters what is used once, a main queue, ghosts.

New blocks enter the small queue, a tenth of the cache. Blocks used twice while in it move to the main queue;
the others are evicted but remembered by fingerprint. A block that returns while it is remembered enters the
main queue directly. The main queue keeps each block for one more round per use, up to 3.

The paper's sizes are shares of the capacity. A policy isn't told the capacity, so here they are shares of the
blocks present, which is the same once evictions begin. Only candidates can be moved or evicted.
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

_SMALL_SHARE = 0.1
_MAX_USES = 3
_USES_TO_MOVE = 2


class S3FIFOPolicy(StampedPolicy):
    """Evicts from the small queue while that is over its share, otherwise from the main queue."""

    name: ClassVar[str] = "s3fifo"

    def __init__(self) -> None:
        super().__init__()
        num_ids = len(self._stamps)
        self._uses: npt.NDArray[np.uint8] = np.zeros(num_ids, dtype=np.uint8)
        self._in_main: npt.NDArray[np.bool_] = np.zeros(num_ids, dtype=np.bool_)
        self._fingerprints: npt.NDArray[np.uint64] = np.zeros(num_ids, dtype=np.uint64)
        """0: unknown."""
        self._small = CandidateHeap(self._rank)
        self._main = CandidateHeap(self._rank)
        self._ghosts = GhostQueue()
        self._num_small = 0
        self._num_main = 0

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Append blocks to the small queue, or to the main queue if they were evicted recently."""
        self._reserve(block_ids)
        self._stamp(block_ids)
        self._uses[block_ids] = 0
        self._in_main[block_ids] = False
        self._fingerprints[block_ids] = 0 if traits.fingerprints is None else traits.fingerprints
        self._num_small += len(block_ids)
        if traits.fingerprints is None or not len(self._ghosts):
            return
        for block_id, fingerprint in zip(block_ids.tolist(), traits.fingerprints.tolist(), strict=True):
            if fingerprint in self._ghosts:
                self._ghosts.recall(fingerprint)
                self._enter_main(block_id)

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Count one more use, up to the maximum."""
        self._uses[block_ids] = np.minimum(self._uses[block_ids] + 1, _MAX_USES)

    def offer(self, block_id: int) -> None:
        """Make the block a candidate."""
        self._queue_of(block_id).offer(block_id)

    def withdraw(self, block_id: int) -> None:
        """Withdraw the candidate."""
        self._queue_of(block_id).withdraw(block_id)

    def victim(self, now: float) -> int | None:
        """Move blocks with enough uses; return the first without."""
        while True:
            num_blocks = self._num_small + self._num_main
            if len(self._small) and (self._num_small >= _SMALL_SHARE * num_blocks or not len(self._main)):
                block_id = self._small.lowest()
                assert block_id is not None
                if self._uses[block_id] < _USES_TO_MOVE:
                    return block_id
                self._small.withdraw(block_id)
                self._enter_main(block_id)
                self._uses[block_id] = 0
                self._restamp(block_id)
                self._main.offer(block_id)
                continue
            block_id = self._main.lowest()
            if block_id is None or not self._uses[block_id]:
                return block_id
            self._uses[block_id] -= 1
            self._restamp(block_id)

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        """Drop the block; remember it if it was evicted from the small queue."""
        self.withdraw(block_id)
        if self._in_main[block_id]:
            self._num_main -= 1
            return
        self._num_small -= 1
        fingerprint = self._fingerprints.item(block_id)
        if evicted and fingerprint:
            max_ghosts = (1 - _SMALL_SHARE) * (self._num_small + self._num_main + 1)
            self._ghosts.remember(fingerprint, int(max_ghosts))

    def _queue_of(self, block_id: int) -> CandidateHeap:
        return self._main if self._in_main[block_id] else self._small

    def _enter_main(self, block_id: int) -> None:
        self._in_main[block_id] = True
        self._num_small -= 1
        self._num_main += 1

    def _restamp(self, block_id: int) -> None:
        self._clock += 1
        self._stamps[block_id] = self._clock

    def _rank(self, block_id: int) -> int:
        return self._stamps.item(block_id)

    def _resize(self, num_ids: int) -> None:
        super()._resize(num_ids)
        self._uses = resized(self._uses, num_ids)
        self._in_main = resized(self._in_main, num_ids)
        self._fingerprints = resized(self._fingerprints, num_ids)
