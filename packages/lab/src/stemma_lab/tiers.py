"""Replaying a trace through several tiers: the device's own index above, `memory/tier_index.py` below.

How tiers share blocks:

* `inclusive`: a block is written to every lower tier when it is computed; a lower tier has what those above
  have, and more.
* `exclusive`: a block is in one tier. It moves down when evicted and up when hit.
* `keep-copy`: like exclusive, but a block that moves up leaves its copy below, so that evicting it again
  costs no write; the policy ranks the copy like any other block.
* `duplicates-first`: the same, but copies of what a tier above holds are evicted before all others.
* `auto`, which a server with host tier and written-back disk does: `duplicates-first` in the tier right below
  the device, where a write costs little, and `keep-copy` further down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from stemma.memory.tiers.index import TierIndex
from stemma.prefix.eviction.policy import NO_CONCLUSION, BlockTraits, Conclusion
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.prefix.radix import RadixIndex
from stemma.types import BlockIds, BlockKey
from stemma_lab.admission import TierAdmission, make_admission
from stemma_lab.policies.registry import make_lab_policy
from stemma_lab.replay import Progress
from stemma_lab.traces.columns import Trace

Sharing: TypeAlias = Literal["inclusive", "exclusive", "keep-copy", "duplicates-first", "auto"]
SHARINGS: tuple[Sharing, ...] = get_args(Sharing)
_NO_PARENT = BlockKey(b"root")


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Tiers to replay through: their sizes, and how they share blocks."""

    capacities: tuple[int, ...]
    """Blocks of the device, then of each tier below."""
    policy: str = "lru"
    sharing: Sharing = "auto"
    admission: str = "all"
    """Which evicted blocks move down: `all`, `reused` or `adaptive`."""


@dataclass(frozen=True, slots=True)
class TierResult:
    """Hits and traffic by tier."""

    plan: TierPlan
    hit_blocks: npt.NDArray[np.int32]
    """Leading prompt blocks served by each tier, shape [num_requests, num_tiers]."""
    num_written: tuple[int, ...]
    """Blocks written to each tier below the device."""

    def hit_ratios(self, trace: Trace) -> tuple[float, ...]:
        """Return block hit ratios by tier; their sum is the whole cache's."""
        total = max(1, trace.num_looked_up_blocks)
        return tuple((self.hit_blocks.sum(axis=0) / total).tolist())

    def hit_tokens(self, trace: Trace) -> npt.NDArray[np.int64]:
        """Return hit tokens by request and tier; the last token of a prompt is always computed."""
        ends = np.cumsum(self.hit_blocks.astype(np.int64), axis=1) * trace.block_size
        ends = np.minimum(ends, np.maximum(trace.input_tokens - 1, 0)[:, None])
        return np.diff(ends, axis=1, prepend=0)


class LowerTier:
    """One tier below the device."""

    def __init__(self, capacity_blocks: int, policy: str, admission: TierAdmission, *, marks: bool) -> None:
        """`marks`: it evicts first what a tier above holds too."""
        self.marks = marks
        self.index = TierIndex(capacity_blocks, make_lab_policy(policy))
        self.admission = admission
        self.num_written = 0

    def write(self, block: int, parent: int, now: float) -> int | None:
        """Take a block; return the block evicted for it, if any (itself, if there is no room)."""
        gone: int | None = None
        slot = self.index.reserve()
        if slot is None:
            # A tier above has what a duplicate holds: it goes nowhere.
            if self.index.evict_duplicate(now) is None:
                victim = self.index.victim(now)
                if victim is None:
                    return block
                gone = block_of(self.index.key_of(victim))
                self.index.evict(now)
            slot = self.index.reserve()
            assert slot is not None
        traits = BlockTraits(fingerprints=np.array([block], dtype=np.uint64))
        self.index.commit(slot, key_of(block), key_of(parent), now, traits)
        self.num_written += 1
        return gone


class TieredCache:
    """A device and the tiers below it."""

    def __init__(self, plan: TierPlan) -> None:
        self._plan = plan
        self.device = RadixIndex(1, make_lab_policy(plan.policy))
        below = plan.capacities[1:]
        self.lower = [
            # What one tier refuses no tier further down gets to see: the decision is about all of them.
            LowerTier(
                size,
                plan.policy,
                make_admission(plan.admission, sum(below[number:])),
                marks=plan.sharing == "duplicates-first" or (plan.sharing == "auto" and number == 0),
            )
            for number, size in enumerate(below)
        ]
        self._free = list(range(plan.capacities[0]))[::-1]
        self._num_ids = plan.capacities[0]
        self._block_in: dict[int, int] = {}
        """Device id -> block of the trace."""
        self._parent_of: dict[int, int] = {}
        """Block -> the block before it, -1 at the root; of all blocks in any tier."""
        self._uses: dict[int, int] = {}

    def serve(
        self, chain: BlockIds, now: float, conclusion: Conclusion = NO_CONCLUSION, session: int = 0
    ) -> list[int]:
        """Serve one request; return the hit blocks by tier."""
        match = self.device.match(DEFAULT_NAMESPACE, chain)
        blocks: list[int] = chain.tolist()
        hits = [match.num_tokens] + [0] * len(self.lower)
        end = self._hits_below(blocks, match.num_tokens, hits, now)
        for position, block in enumerate(blocks):
            self._uses[block] = self._uses.get(block, 0) + 1
            self._parent_of.setdefault(block, blocks[position - 1] if position else -1)
        if match.num_tokens:
            self.device.touch(match.block_ids, now)
        if match.num_tokens < len(chain):
            fresh = self._take(len(chain) - match.num_tokens)
            self._block_in.update(zip(fresh, blocks[match.num_tokens :], strict=True))
            ids = np.concatenate((match.block_ids, np.asarray(fresh, dtype=np.int32)))
            traits = BlockTraits(fingerprints=chain.astype(np.uint64), session=session)
            self.device.insert(DEFAULT_NAMESPACE, chain, ids, now, traits)
            self.device.conclude(ids, conclusion)
        else:
            self.device.conclude(match.block_ids, conclusion)
        for tier in self.lower:
            if tier.marks:
                # The head of a chain stays above the longest, so its copy is the first to go.
                tier.index.mark_duplicates(key_of(block) for block in reversed(blocks))
        if self._plan.sharing == "inclusive":
            self._write_through(blocks, end, now)
        self._make_room(now)
        return hits

    def _hits_below(self, blocks: list[int], start: int, hits: list[int], now: float) -> int:
        """Count hits of `blocks[start:]` in the lower tiers, move them up; return where they end."""
        found: list[list[int]] = [[] for _ in self.lower]
        end = start
        for tier in self.lower:
            # All of them, not only up to the first miss: with other contents that block might be a hit.
            for block in blocks[start:]:
                tier.admission.looked_up(block)
        for block in blocks[start:]:
            key = key_of(block)
            number = next((n for n, tier in enumerate(self.lower) if key in tier.index), None)
            if number is None:
                break
            hits[number + 1] += 1
            found[number].append(block)
            end += 1
        if self._plan.sharing == "inclusive":
            return end
        for tier, moved in zip(self.lower, found, strict=True):
            slots = [slot for slot in map(tier.index.find, map(key_of, moved)) if slot is not None]
            if self._plan.sharing == "exclusive":
                for slot in reversed(slots):
                    tier.index.drop(slot, now)
            else:
                tier.index.touch(slots, now)
        return end

    def _write_through(self, blocks: list[int], num_known: int, now: float) -> None:
        for tier in self.lower:
            slots = []
            for block in blocks:
                slot = tier.index.find(key_of(block))
                if slot is not None:
                    slots.append(slot)
            tier.index.touch(slots, now)
            for block in blocks:
                if key_of(block) not in tier.index:
                    tier.write(block, self._parent_of[block], now)

    def _make_room(self, now: float) -> None:
        excess = self.device.num_blocks - self._plan.capacities[0]
        if excess <= 0:
            return
        for device_id in self.device.evict(excess, now).tolist():
            block = self._block_in.pop(device_id)
            self._free.append(device_id)
            if self._plan.sharing != "inclusive":
                self._demote(block, 0, now)

    def _demote(self, block: int, number: int, now: float) -> None:
        """Move an evicted block to tier `number` below the device, and what it displaces further down."""
        moving: int | None = block
        while moving is not None and number < len(self.lower):
            tier = self.lower[number]
            tier.index.unmark_duplicates([key_of(moving)])
            if (slot := tier.index.find(key_of(moving))) is not None:
                tier.index.touch([slot], now)
                return
            if not tier.admission.admits(moving, self._uses[moving]):
                return
            moving = tier.write(moving, self._parent_of[moving], now)
            number += 1

    def _take(self, num_blocks: int) -> list[int]:
        while len(self._free) < num_blocks:
            self._free.append(self._num_ids)
            self._num_ids += 1
        taken = self._free[len(self._free) - num_blocks :]
        del self._free[len(self._free) - num_blocks :]
        return taken


def replay_tiers(trace: Trace, plan: TierPlan, progress: Progress | None = None) -> TierResult:
    """Replay the trace through the tiers. Raises ConfigError for an unknown policy."""
    cache = TieredCache(plan)
    hits = np.zeros((trace.num_requests, len(plan.capacities)), dtype=np.int32)
    offsets, ids = trace.offsets.tolist(), trace.block_ids
    for request, now in enumerate(trace.timestamps_s.tolist()):
        chain = ids[offsets[request] : offsets[request + 1]]
        by_tier = cache.serve(chain, now, trace.conclusion_of(request), trace.session_of(request))
        room = int(trace.num_prompt_blocks[request])
        for number, num_hit in enumerate(by_tier):
            hits[request, number] = min(num_hit, room)
            room -= int(hits[request, number])
        if progress is not None:
            progress(1)
    return TierResult(plan, hits, tuple(tier.num_written for tier in cache.lower))


def key_of(block: int) -> BlockKey:
    """Return the key that stands for a block of the trace; -1 is the root."""
    return BlockKey(block.to_bytes(4, "little")) if block >= 0 else _NO_PARENT


def block_of(key: BlockKey) -> int:
    """Return the block of the trace that `key_of` named."""
    return int.from_bytes(key, "little")
