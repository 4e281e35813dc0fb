"""A policy that proves that an index keeps the policies' contract, and passes the calls on."""

from __future__ import annotations

from typing import ClassVar

from stemma.prefix.eviction.policy import BlockTraits, Conclusion, EvictionPolicy
from stemma.types import BlockIds


class StrictPolicy(EvictionPolicy):
    """Wraps a policy; `known` and `candidates` are what the index told it so far."""

    name: ClassVar[str] = "strict"

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.known: set[int] = set()
        self.candidates: set[int] = set()
        self.fingerprints: dict[int, int] = {}

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        ids = block_ids.tolist()
        assert ids
        assert len(set(ids)) == len(ids)
        assert self.known.isdisjoint(ids)
        for array in (traits.fingerprints, traits.costs_s):
            assert array is None or len(array) == len(ids)
        self.known.update(ids)
        if traits.fingerprints is not None:
            self.fingerprints.update(zip(ids, traits.fingerprints.tolist(), strict=True))
        self.policy.insert(block_ids, now, traits)

    def access(self, block_ids: BlockIds, now: float) -> None:
        assert self.known.issuperset(block_ids.tolist())
        self.policy.access(block_ids, now)

    def conclude(self, block_ids: BlockIds, conclusion: Conclusion) -> None:
        assert self.known.issuperset(block_ids.tolist())
        self.policy.conclude(block_ids, conclusion)

    def offer(self, block_id: int) -> None:
        assert block_id in self.known
        assert block_id not in self.candidates
        self.candidates.add(block_id)
        self.policy.offer(block_id)

    def withdraw(self, block_id: int) -> None:
        self.candidates.remove(block_id)
        self.policy.withdraw(block_id)

    def victim(self, now: float) -> int | None:
        victim = self.policy.victim(now)
        assert victim in self.candidates if self.candidates else victim is None
        return victim

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        assert not evicted or block_id in self.candidates
        self.known.remove(block_id)
        self.candidates.discard(block_id)
        self.policy.drop(block_id, now, evicted=evicted)
