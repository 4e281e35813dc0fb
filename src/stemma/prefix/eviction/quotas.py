"""Owners with a quota: who holds more loses own blocks first, by last use; apart from that a policy decides.

An index puts this around its policy while there are quotas. Only the blocks of owners that have one are
counted, with what they are charged for beside blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import BlockTraits, Conclusion, EvictionPolicy
from stemma.types import BlockIds


@dataclass(slots=True)
class _Owned:
    name: str
    quota: int
    charged: int = 0
    """Blocks' worth of memory that the owner holds beside its blocks."""
    ranking: LRUPolicy = field(default_factory=LRUPolicy)
    blocks: set[int] = field(default_factory=set)
    candidates: set[int] = field(default_factory=set)

    @property
    def num_over(self) -> int:
        return len(self.blocks) + self.charged - self.quota


class QuotaPolicy(EvictionPolicy):
    """`base`, except that owners over their quota come first."""

    name: ClassVar[str] = "quota"

    def __init__(self, base: EvictionPolicy, quotas: Mapping[str, int]) -> None:
        """`base` goes on as it is; `quotas` are blocks by owner. `adopt` tells of blocks that are there."""
        self.base = base
        self._owned = {owner: _Owned(owner, quota) for owner, quota in quotas.items()}
        self._of: dict[int, _Owned] = {}
        """Block -> its owner, if that has a quota."""
        self._over: dict[str, _Owned] = {}

    @property
    def num_over(self) -> int:
        """Blocks that can be evicted now and whose owners hold too many."""
        return sum(min(each.num_over, len(each.candidates)) for each in self._over.values())

    @property
    def owners_over(self) -> list[str]:
        """Owners that hold too much."""
        return list(self._over)

    def charge(self, owner: str, num_blocks: int) -> None:
        """Count memory for so many blocks that an owner holds beside its blocks."""
        if (owned := self._owned.get(owner)) is not None:
            owned.charged = num_blocks
            self._judge(owned)

    def first_of(self, owner: str) -> int | None:
        """Return the oldest candidate of an owner that holds too much; None: it has none."""
        owned = self._over.get(owner)
        return None if owned is None or not owned.candidates else owned.ranking.victim(0.0)

    def adopt(self, block_ids: BlockIds, traits: BlockTraits, now: float) -> None:
        """Count blocks that `base` knows already, in order from the root."""
        owned = self._owned.get(traits.owner)
        if owned is None or not len(block_ids):
            return
        ids = block_ids.tolist()
        owned.ranking.insert(block_ids, now, traits)
        owned.blocks.update(ids)
        self._of.update(dict.fromkeys(ids, owned))
        self._judge(owned)

    def adopt_candidate(self, block_id: int) -> None:
        """Note that a block may be evicted, as `base` knows already."""
        owned = self._of.get(block_id)
        if owned is not None:
            owned.candidates.add(block_id)
            owned.ranking.offer(block_id)

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Count the blocks."""
        self.adopt(block_ids, traits, now)
        self.base.insert(block_ids, now, traits)

    def access(self, block_ids: BlockIds, now: float) -> None:
        """Note a use of a chain; its blocks may have several owners, and some none."""
        used: dict[int, tuple[_Owned, list[int]]] = {}
        for block_id in block_ids.tolist():
            if (owned := self._of.get(block_id)) is not None:
                used.setdefault(id(owned), (owned, []))[1].append(block_id)
        for owned, ids in used.values():
            owned.ranking.access(np.array(ids, dtype=np.int32), now)
        self.base.access(block_ids, now)

    def conclude(self, block_ids: BlockIds, conclusion: Conclusion) -> None:
        """Pass it on."""
        self.base.conclude(block_ids, conclusion)

    def hint(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Pass it on."""
        self.base.hint(block_ids, now, traits)

    def offer(self, block_id: int) -> None:
        """Make the block a candidate."""
        self.adopt_candidate(block_id)
        self.base.offer(block_id)

    def withdraw(self, block_id: int) -> None:
        """Take the candidate back."""
        owned = self._of.get(block_id)
        if owned is not None:
            owned.candidates.discard(block_id)
            owned.ranking.withdraw(block_id)
        self.base.withdraw(block_id)

    def victim(self, now: float) -> int | None:
        """Return the oldest candidate of an owner over its quota, or else what `base` says."""
        for owned in self._over.values():
            if owned.candidates:
                return owned.ranking.victim(now)
        return self.base.victim(now)

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        """Count the block out."""
        owned = self._of.pop(block_id, None)
        if owned is not None:
            owned.blocks.discard(block_id)
            owned.candidates.discard(block_id)
            owned.ranking.drop(block_id, now, evicted=evicted)
            self._judge(owned)
        self.base.drop(block_id, now, evicted=evicted)

    def _judge(self, owned: _Owned) -> None:
        if owned.num_over > 0:
            self._over[owned.name] = owned
        else:
            self._over.pop(owned.name, None)
