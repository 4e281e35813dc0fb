"""Records of an index for each block id, apart from its place in the structure: presence, kind, pins.

Ids are small, dense ints, so these are plain arrays that grow on demand. The structure of a tree may change
(split, merge, trim) without touching them, and pinning a chain of thousands of blocks is a few array
operations.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from stemma.errors import IntegrityError
from stemma.prefix.eviction.fallback import fall_back
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import BlockTraits, Conclusion, EvictionPolicy
from stemma.prefix.eviction.quotas import QuotaPolicy
from stemma.prefix.index import PrefixIndex
from stemma.types import BlockIds

ABSENT, FULL, PARTIAL = 0, 1, 2
NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)
NO_BLOCKS.flags.writeable = False


class BlockLedger:
    """State and pin count of every block id."""

    def __init__(self) -> None:
        self.states: npt.NDArray[np.uint8] = np.zeros(1024, dtype=np.uint8)
        self.pins: npt.NDArray[np.int32] = np.zeros(1024, dtype=np.int32)
        self.num_blocks = 0
        self.num_pinned = 0

    def require_new(self, block_ids: BlockIds) -> None:
        """Raise ValueError unless the ids are non-negative, distinct and absent."""
        ids = block_ids.tolist()
        if not ids:
            return
        if len(set(ids)) != len(ids):
            raise ValueError("a block id is offered twice")
        if min(ids) < 0:
            raise ValueError(f"negative block id {min(ids)}")
        highest = max(ids)
        if highest >= len(self.states):
            self._grow(highest + 1)
        if self.states[block_ids].any():
            present = [i for i in ids if self.states[i] != ABSENT]
            raise ValueError(f"block {present[0]} is already in the index elsewhere")

    def add(self, block_ids: BlockIds) -> None:
        """Enter full blocks that `require_new` accepted."""
        self.states[block_ids] = FULL
        self.num_blocks += len(block_ids)

    def set_partial(self, block_id: int, partial: bool) -> None:
        """Set whether a present block is partial."""
        self.states[block_id] = PARTIAL if partial else FULL

    def remove(self, block_ids: BlockIds | list[int]) -> None:
        """Remove blocks that are present and unpinned."""
        self.states[block_ids] = ABSENT
        self.num_blocks -= len(block_ids)

    def states_of(self, block_ids: BlockIds) -> npt.NDArray[np.uint8]:
        """Return the state of each id; raise ValueError if one isn't in the index."""
        try:
            # As unsigned, a negative id is out of range instead of counting from the end.
            states = self.states[block_ids.astype(np.uint32)]
        except IndexError:
            raise ValueError("a block isn't in the index") from None
        if not states.all():
            raise ValueError("a block isn't in the index")
        return states

    def pin(self, block_ids: BlockIds) -> list[int]:
        """Count one more pin of each (distinct) full block; return those that had none."""
        if (self.states_of(block_ids) == PARTIAL).any():
            raise ValueError("a partial block can't be pinned: copy it")
        self.pins[block_ids] += 1
        fresh: list[int] = block_ids[self.pins[block_ids] == 1].tolist()
        self.num_pinned += len(fresh)
        return fresh

    def unpin(self, block_ids: BlockIds) -> list[int]:
        """Remove one pin of each (distinct) block; return those that have none left."""
        self.states_of(block_ids)
        if not self.pins[block_ids].all():
            raise ValueError("a block isn't pinned")
        self.pins[block_ids] -= 1
        freed: list[int] = block_ids[self.pins[block_ids] == 0].tolist()
        self.num_pinned -= len(freed)
        return freed

    def check(self, full: set[int], partial: set[int]) -> None:
        """Compare with the blocks that the structure holds; raise IntegrityError if they differ."""
        if set(np.flatnonzero(self.states == FULL).tolist()) != full:
            raise IntegrityError("the ledger's full blocks aren't those of the structure")
        if set(np.flatnonzero(self.states == PARTIAL).tolist()) != partial:
            raise IntegrityError("the ledger's partial blocks aren't those of the structure")
        if self.num_blocks != len(full) + len(partial):
            raise IntegrityError(f"num_blocks is {self.num_blocks}, not {len(full) + len(partial)}")
        pinned = set(np.flatnonzero(self.pins).tolist())
        if self.num_pinned != len(pinned) or (self.pins < 0).any():
            raise IntegrityError("the number of pinned blocks is wrong")
        if not pinned <= full:
            raise IntegrityError("a block is pinned that is partial or absent")

    def _grow(self, num_ids: int) -> None:
        size = max(num_ids, 2 * len(self.states))
        for name in ("states", "pins"):
            old = getattr(self, name)
            new = np.zeros(size, dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)


class LedgerIndex(PrefixIndex):
    """Base of the indexes: pins, uses, counts and the policy, by block id. A subclass owns the structure.

    `_tails` holds the blocks without descendants; the unpinned ones are offered to the policy.
    """

    _tails: Container[int]

    def __init__(self, block_size: int, policy: EvictionPolicy | None = None) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.block_size = block_size
        self._policy: EvictionPolicy = LRUPolicy() if policy is None else policy
        self._ledger = BlockLedger()
        self._quotas: Mapping[str, int] = {}
        self._charges: dict[str, int] = {}
        self.num_policy_failures = 0

    @abstractmethod
    @override
    def check(self) -> None:
        return None

    @override
    def touch(self, block_ids: BlockIds, now: float) -> None:
        if len(block_ids):
            self._ledger.states_of(block_ids)
            try:
                self._policy.access(block_ids, now)
            except Exception as error:  # noqa: BLE001 - see `_policy_failed`
                self._policy_failed(error)

    @override
    def hint(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        if len(block_ids):
            self._ledger.states_of(block_ids)
            try:
                self._policy.hint(block_ids, now, traits)
            except Exception as error:  # noqa: BLE001 - see `_policy_failed`
                self._policy_failed(error)

    @override
    def conclude(self, block_ids: BlockIds, conclusion: Conclusion) -> None:
        if len(block_ids):
            self._ledger.states_of(block_ids)
            try:
                self._policy.conclude(block_ids, conclusion)
            except Exception as error:  # noqa: BLE001 - see `_policy_failed`
                self._policy_failed(error)

    @override
    def pin(self, block_ids: BlockIds) -> None:
        if len(block_ids):
            pinned = self._ledger.pin(block_ids)
            try:
                for block_id in pinned:
                    if block_id in self._tails:
                        self._policy.withdraw(block_id)
            except Exception as error:  # noqa: BLE001 - see `_policy_failed`
                self._policy_failed(error)

    @override
    def unpin(self, block_ids: BlockIds) -> None:
        if len(block_ids):
            unpinned = self._ledger.unpin(block_ids)
            try:
                for block_id in unpinned:
                    if block_id in self._tails:
                        self._policy.offer(block_id)
            except Exception as error:  # noqa: BLE001 - see `_policy_failed`
                self._policy_failed(error)

    @override
    def evict(self, num_blocks: int, now: float) -> BlockIds:
        evicted: list[int] = []
        while True:
            try:
                self._evict(num_blocks, now, evicted)
            except Exception as error:  # noqa: BLE001 - see `_policy_failed`
                self._policy_failed(error)
                continue
            if not evicted:
                return NO_BLOCKS
            self._ledger.remove(evicted)
            return np.array(evicted, dtype=np.int32)

    @override
    def next_victim(self, now: float) -> int | None:
        try:
            return self._policy.victim(now)
        except Exception as error:  # noqa: BLE001 - see `_policy_failed`
            self._policy_failed(error)
            return self._policy.victim(now)

    @abstractmethod
    def _evict(self, num_blocks: int, now: float, evicted: list[int]) -> None:
        """Remove blocks from the structure and add them to `evicted` until it holds `num_blocks`.

        Even if the policy raises, the structure is consistent and lacks exactly the blocks in `evicted`.
        """

    def _tell_policy(
        self, inserted: BlockIds, now: float, traits: BlockTraits, *, dropped_partial: int, withdrawn: int
    ) -> None:
        """Report an insert that the structure has made: what it cost other blocks, if anything (else -1)."""
        try:
            if dropped_partial >= 0:
                self._policy.drop(dropped_partial, now, evicted=False)
            if withdrawn >= 0:
                self._policy.withdraw(withdrawn)
            self._policy.insert(inserted, now, traits)
            self._policy.offer(int(inserted[-1]))
        except Exception as error:  # noqa: BLE001 - see `_policy_failed`
            self._policy_failed(error)

    def _policy_failed(self, error: Exception) -> None:
        """Continue with LRU; the structure is consistent. Raises `error` if LRU was in use already."""
        blocks: list[int] = []
        tails: list[int] = []
        for _, _, chain in self.walk():
            blocks += chain.tolist()
            if not self._ledger.pins[chain[-1]]:
                tails.append(int(chain[-1]))
        self._policy = fall_back(self._base_policy(), error, blocks, tails)
        self.num_policy_failures += 1
        self.set_quotas(self._quotas)

    def _base_policy(self) -> EvictionPolicy:
        return self._policy.base if isinstance(self._policy, QuotaPolicy) else self._policy

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Set how many blocks each owner may hold; others hold any number. Evicts nothing. O(blocks)."""
        self._quotas = dict(quotas)
        base = self._base_policy()
        if not quotas:
            self._policy = base
            return
        policy = QuotaPolicy(base, quotas)
        for namespace, _, chain in self.walk():
            policy.adopt(chain, BlockTraits(owner=namespace.owner), 0.0)
            if not self._ledger.pins[chain[-1]]:
                policy.adopt_candidate(int(chain[-1]))
        for owner, num_blocks in self._charges.items():
            policy.charge(owner, num_blocks)
        self._policy = policy

    @override
    def charge(self, owner: str, num_blocks: int) -> None:
        self._charges[owner] = num_blocks
        if not num_blocks:
            del self._charges[owner]
        if isinstance(self._policy, QuotaPolicy):
            self._policy.charge(owner, num_blocks)

    @property
    @override
    def owners_over_quota(self) -> list[str]:
        return self._policy.owners_over if isinstance(self._policy, QuotaPolicy) else []

    @override
    def next_of(self, owner: str) -> int | None:
        return self._policy.first_of(owner) if isinstance(self._policy, QuotaPolicy) else None

    @property
    def num_over_quota(self) -> int:
        """Blocks that can be evicted now and whose owners hold too many. O(owners that do)."""
        return self._policy.num_over if isinstance(self._policy, QuotaPolicy) else 0

    @property
    @override
    def num_blocks(self) -> int:
        return self._ledger.num_blocks

    @property
    def num_evictable(self) -> int:
        """Number of blocks that a large enough `evict` would evict now. O(1)."""
        return self._ledger.num_blocks - self._ledger.num_pinned

    def _require_lengths(self, num_tokens: int, block_ids: BlockIds, traits: BlockTraits) -> None:
        num_blocks = -(-num_tokens // self.block_size)
        if len(block_ids) != num_blocks:
            raise ValueError(f"{num_tokens} tokens need {num_blocks} blocks, not {len(block_ids)}")
        for array in (traits.fingerprints, traits.costs_s):
            if array is not None and len(array) != num_blocks:
                raise ValueError(f"traits of {len(array)} blocks for {num_blocks} blocks")


def traits_from(traits: BlockTraits, first: int, after: int, owner: str) -> BlockTraits:
    """Return `traits` without the entries of the first `first` blocks; `after` is the last of those."""
    if first == 0 and not owner:
        return traits
    return replace(traits.part(first), owner=owner, after=after)
