"""A cache of whole runs of blocks, least recently used first, leaves before what they stand on.

A run is a piece of prompts that is always used as a whole (`traffic.py`). Keeping a count for each run in
place of its blocks lets a hundred million blocks fit into a gigabyte; what is evicted is what an LRU cache of
single blocks evicts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Piece = tuple[int, int, int]
"""Blocks of a run: its number, the first block and the one behind the last."""


@dataclass(slots=True)
class CacheChange:
    """Blocks that a use stored and evicted."""

    stored: list[Piece] = field(default_factory=list)
    evicted: list[Piece] = field(default_factory=list)


class RunCache:
    """Leading blocks of runs, `capacity` of them in all."""

    def __init__(self, capacity: int) -> None:
        self.num_blocks = 0
        self._capacity = capacity
        self._held: OrderedDict[int, int] = OrderedDict()
        """By run, least recently used first: how many of its leading blocks are held."""

    @property
    def pieces(self) -> list[Piece]:
        """All that is held."""
        return [(run, 0, count) for run, count in self._held.items()]

    def num_cached(self, chain: Sequence[int], sizes: Sequence[int]) -> int:
        """Return how many leading blocks of a chain are held. `sizes`: blocks of each of its runs."""
        num_cached = 0
        for run, size in zip(chain, sizes, strict=True):
            held = self._held.get(run, 0)
            num_cached += held
            if held < size:
                break
        return num_cached

    def use(self, chain: Sequence[int], sizes: Sequence[int]) -> CacheChange:
        """Use what is held of a chain and enter the rest; then evict until the cache fits."""
        change, held = CacheChange(), self._held
        for run, size in zip(reversed(chain), reversed(sizes), strict=True):  # a leaf is older than its stem
            before = held.get(run, 0)
            if before < size:
                change.stored.append((run, before, size))
                self.num_blocks += size - before
            held[run] = size
            held.move_to_end(run)
        change.stored.reverse()
        while self.num_blocks > self._capacity:
            run, count = next(iter(held.items()))
            kept = max(0, count - (self.num_blocks - self._capacity))
            change.evicted.append((run, kept, count))
            self.num_blocks -= count - kept
            if kept:
                held[run] = kept
            else:
                del held[run]
        return change
