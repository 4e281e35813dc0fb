"""Quotas in a pool: what this server wrote there for each owner, and what has to go when it is too much.

A pool is shared with other servers and says nothing of whose blocks it holds. So a server counts its own
writes since its start, for the owners that have a quota, and removes the least recently used leaves of an
owner beyond it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from stemma.memory.tiers.block_store import BlockPut
from stemma.memory.tiers.index import TierIndex
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import DEFAULT_TRAITS
from stemma.types import BlockKey

_SPARE_BLOCKS = 64
"""Counted beyond a quota before any is removed: those of one call, so that the end of a chain goes."""


class OwnerShares:
    """Blocks by owner, for owners with a quota. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_owner: dict[str, TierIndex] = {}

    def set_quotas(self, quotas: Mapping[str, int]) -> list[BlockKey]:
        """Set how many blocks each owner (`owner_tag`) may hold; return those to remove, leaves first."""
        removed: list[BlockKey] = []
        with self._lock:
            before, self._by_owner = self._by_owner, {}
            for owner, quota in quotas.items():
                self._by_owner[owner] = TierIndex(quota + _SPARE_BLOCKS, LRUPolicy())
                known = [] if owner not in before else [(key, up) for _, key, up in before[owner].live()]
                removed += self._count(owner, known)
        return removed

    def written(self, blocks: Sequence[BlockPut]) -> list[BlockKey]:
        """Count blocks that the pool took or had; return those to remove, leaves first."""
        by_owner: dict[str, list[tuple[BlockKey, BlockKey]]] = {}
        for block in blocks:
            by_owner.setdefault(block.owner, []).append((block.key, block.parent))
        with self._lock:
            return [
                key
                for owner, some in by_owner.items()
                if owner in self._by_owner
                for key in self._count(owner, some)
            ]

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Count blocks as used."""
        with self._lock:
            for index in self._by_owner.values():
                index.touch([slot for key in keys if (slot := index.find(key)) is not None], 0.0)

    def num_blocks(self, owner: str) -> int:
        """Return how many blocks are counted for an owner."""
        with self._lock:
            return len(self._by_owner[owner]) if owner in self._by_owner else 0

    def _count(self, owner: str, blocks: Sequence[tuple[BlockKey, BlockKey]]) -> list[BlockKey]:
        """Count blocks, (key, parent) each; return what is beyond the quota then, counted no longer."""
        index = self._by_owner[owner]
        quota = index.capacity_blocks - _SPARE_BLOCKS
        beyond: list[BlockKey] = []
        for start in range(0, len(blocks), _SPARE_BLOCKS):
            for key, parent in blocks[start : start + _SPARE_BLOCKS]:
                if (known := index.find(key)) is not None:
                    index.touch([known], 0.0)
                elif (slot := index.reserve()) is not None:
                    index.commit(slot, key, parent, 0.0, DEFAULT_TRAITS)
            while len(index) > quota and (victim := index.victim(0.0)) is not None:
                beyond.append(index.key_of(victim))
                index.evict(0.0)
        return beyond
