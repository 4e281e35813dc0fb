"""Device blocks that are cached: what enters the prefix index, is used there, and leaves it.

The index, a record of each of its blocks, the index's own references in the allocator, and the lower tiers'
knowledge of all this change together, and only here. Pins belong to leases: `leased_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from stemma.errors import IntegrityError
from stemma.memory.cache.block_records import BlockRecords
from stemma.memory.cache.elsewhere import Elsewhere
from stemma.memory.cache.lease import Lease
from stemma.memory.cache.loaded_ahead import LoadedAhead
from stemma.memory.cache.turns import Turn, turn_of
from stemma.memory.device.allocator import BlockAllocator
from stemma.memory.kv_events import BlocksRemoved, BlocksStored, KVEventSink
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.lower import LowerTiers
from stemma.prefix.eviction.policy import Conclusion
from stemma.prefix.explain import Miss, MissReason
from stemma.prefix.index import Match, PrefixIndex
from stemma.prefix.keys import owner_tag, partial_key
from stemma.types import BlockIds, BlockKey, Tier

_OVER_QUOTA = "because its tenant held more than its quota"


@dataclass(frozen=True, slots=True)
class Entered:
    """The blocks of a lease as the index took them."""

    canonical: BlockIds
    """Block ids in the index of the lease's full blocks from `lease.num_committed` on. An id differs from the
    lease's own if the index already held an identical block."""
    added: list[int]
    """Blocks of the lease that the index took."""


class CachedBlocks:
    """The blocks of the index, each with a record and one reference. Not thread-safe."""

    def __init__(
        self,
        index: PrefixIndex,
        allocator: BlockAllocator,
        lower: LowerTiers | None,
        elsewhere: Elsewhere,
        *,
        policy_name: str,
        block_costs: npt.NDArray[np.float32] | None,
        clock: Callable[[], float],
        on_left: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        """`lower` is told what enters, is used and is evicted, `elsewhere` for whom something enters.

        `on_left` learns the keys of full blocks that left, before they may be written again.
        For the others see `PrefixCache`.
        """
        self.index = index
        """Use it only for what doesn't change its set of blocks: matches, pins, walks."""
        self.version = 0
        """Changes whenever a match may have changed."""
        self.num_evicted = 0
        self.events: KVEventSink | None = None
        """Learns of full blocks that enter and leave the index."""
        self.ahead = LoadedAhead()
        self._block_size = index.block_size
        self._allocator = allocator
        self._lower = lower
        self._elsewhere = elsewhere
        self._block_costs = block_costs
        self._clock = clock
        self._on_left = on_left
        self._records = BlockRecords(allocator.num_blocks, index.block_size, policy_name)

    @property
    def num_ghosts(self) -> int:
        """Number of blocks remembered after they left."""
        return self._records.num_ghosts

    @property
    def num_regretted(self) -> int:
        """Blocks that were evicted and came back within a minute."""
        return self._records.num_regretted

    def keys(self, block_ids: BlockIds) -> npt.NDArray[np.uint8]:
        """Return the keys of blocks, [n, 32], a copy."""
        return self._records.keys(block_ids)

    def enter(self, lease: Lease, num_full: int, num_tail: int) -> Entered:
        """Enter the leading `num_full` blocks of a lease and the first `num_tail` tokens of the next one.

        The lease isn't changed, and lower tiers aren't told yet: `copy_down` does that.
        """
        tail_key = None
        if num_tail:
            start = num_full * self._block_size
            tail_key = partial_key(lease.key_before(num_full), lease.tokens[start : start + num_tail])
        inserted = self.index.insert(
            lease.namespace,
            lease.tokens[: num_full * self._block_size + num_tail],
            lease.block_table[: num_full + (1 if num_tail else 0)],
            self._clock(),
            lease.traits(num_full, tail=tail_key, costs=self._block_costs),
        )
        self._allocator.acquire(inserted.added)
        for block_id in inserted.dropped.tolist():
            self._records.remove(block_id)
        self._allocator.free(inserted.dropped)
        added = self._record(lease, inserted.canonical, num_full, tail_key, num_tail)
        self.version += 1
        self._elsewhere.note(lease.namespace)
        return Entered(inserted.canonical[lease.num_committed : num_full], added)

    def copy_down(self, block_ids: list[int]) -> None:
        """Let the lower tiers copy blocks that were just entered (write-through)."""
        if self._lower is not None and block_ids:
            self._lower.on_commit([self._records.describe(i) for i in block_ids])

    def use(self, block_ids: BlockIds) -> None:
        """Count a use of these blocks, a chain from the root, by a request that shares them."""
        now = self._clock()
        self.index.touch(block_ids, now)
        self._records.used_at[block_ids] = now
        self.ahead.use(block_ids)
        if self._lower is not None and self._lower.stores and len(block_ids):
            self._lower.on_hit(self._describe(block_ids))

    def renew_hints(self, lease: Lease, block_ids: BlockIds) -> None:
        """Let a lease's hints hold for its leading blocks, which it still pins, whoever brought them."""
        self.index.hint(block_ids, self._clock(), lease.traits(len(block_ids)))
        first = lease.roots.num_public  # the hints of a public head are the operator's
        for block, block_id in enumerate(block_ids[first:].tolist(), first):
            self._records.renew_hint(block_id, lease.hint(block))
        if self._lower is not None and self._lower.stores:
            self._lower.on_renew(self._describe(block_ids[first:]))

    def conclude(self, match: Match, num_tokens: int, conclusion: Conclusion) -> None:
        """Tell the policy how the request ended whose `num_tokens` tokens with KV were found as `match`."""
        is_whole = match.num_tokens == num_tokens
        num_blocks = len(match.block_ids) if is_whole else match.num_full_blocks(self._block_size)
        self.index.conclude(match.block_ids[:num_blocks], conclusion)

    def use_head(self, block_id: int) -> None:
        """Count a use of a block whose head a request copied; it may have been evicted since."""
        if self._records.num_tokens(block_id):
            self.index.touch(np.array([block_id], dtype=np.int32), self._clock())

    def evict(self, num_blocks: int, cause: str | None = None) -> int:
        """Evict up to `num_blocks` blocks, lowest-ranked first; return how many were evicted.

        `cause` ends the sentence that explains it later; None: it is to make room.
        """
        evicted = self.index.evict(num_blocks, self._clock())
        if not len(evicted):
            return 0
        blocks = self._describe(evicted)
        try:
            if self._lower is not None:
                self._lower.on_evict(blocks)
        finally:
            # They are out of the index. Free them even if copying them down failed: nobody else would.
            self._drop(evicted, blocks, MissReason.EVICTED, cause or f"to make room for {num_blocks} blocks")
            self.num_evicted += len(evicted)
        return len(evicted)

    def first(self) -> tuple[BlockKey, Turn] | None:
        """Return the key of the block that goes first, and its turn; None: no block can."""
        now = self._clock()
        block_id = self.index.next_victim(now)
        if block_id is None:
            return None
        turn = turn_of(self._records.hint(block_id), float(self._records.used_at[block_id]), now)
        return self._records.key(block_id), turn

    def keep_quotas(self) -> None:
        """Evict blocks of owners that hold too many, and no others; what requests hold stays."""
        while num_over := self.index.num_over_quota:
            if not self.evict(num_over, _OVER_QUOTA):
                return

    def charge(self, owner: str, num_blocks: int) -> None:
        """Count to an owner's quota what it holds beside blocks: memory for so many."""
        self.index.charge(owner, num_blocks)

    def owners_over_quota(self) -> list[str]:
        """Return the owners that hold too much."""
        return self.index.owners_over_quota

    def oldest_of(self, owner: str) -> float | None:
        """Return the last use of the block that an owner over its quota loses first; None: all are in use."""
        block_id = self.index.next_of(owner)
        return None if block_id is None else float(self._records.used_at[block_id])

    def evict_over_quota(self) -> bool:
        """Evict that block of the first such owner; False: there is none."""
        return self.index.num_over_quota > 0 and self.evict(1, _OVER_QUOTA) > 0

    def flush(self) -> int:
        """Drop every block that isn't pinned, without demoting any; return how many."""
        dropped = self.index.evict(self.index.num_evictable, self._clock())
        blocks = self._describe(dropped)
        if self._lower is not None:
            self._lower.on_drop(blocks)
        self._drop(dropped, blocks, MissReason.FLUSHED)
        return len(dropped)

    def describe(self, block_ids: BlockIds) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint8]]:
        """Return seconds since the last use, [n], and keys, [n, 32], of blocks in the index."""
        return self._clock() - self._records.used_at[block_ids], self._records.keys(block_ids)

    def explain(self, lease: Lease, found: Match, num_lost: int) -> Miss:
        """Return why a lease doesn't have more cached tokens; see `BlockRecords.explain`."""
        return self._records.explain(lease, found, num_lost, self._clock())

    def has(self, block_id: int) -> bool:
        """Return whether a block is in the index."""
        return self._records.num_tokens(block_id) > 0

    def all_keys(self) -> set[BlockKey]:
        """Return the keys of all blocks in the index (slow)."""
        return {block.key for block in self._describe(np.flatnonzero(self.present()).astype(np.int32))}

    def present(self) -> npt.NDArray[np.bool_]:
        """Return which blocks are in the index, shape [num_blocks]."""
        return self._records.present()

    def check(self) -> None:
        """Raise IntegrityError if the index is broken or its blocks differ from the records (slow)."""
        self.index.check()
        num_recorded = int(self.present().sum())
        if self.index.num_blocks != num_recorded:
            raise IntegrityError(f"{self.index.num_blocks} in the index, {num_recorded} recorded")

    def _record(
        self, lease: Lease, canonical: BlockIds, num_full: int, tail_key: BlockKey | None, num_tail: int
    ) -> list[int]:
        """Record the blocks that the index took from this lease; one may have grown since. Return them."""
        table, now = lease.block_table, self._clock()
        taken: list[int] = []
        new: list[int] = []
        for i in range(lease.num_committed, len(canonical)):
            block_id = int(table[i])
            num_tokens = self._block_size if i < num_full else num_tail
            if canonical[i] != block_id or self._records.num_tokens(block_id) == num_tokens:
                continue
            key = lease.key(i) if i < num_full or tail_key is None else tail_key
            self._records.remove(block_id)
            self._records.add(
                DeviceBlock(
                    block_id,
                    key,
                    lease.key_before(i),
                    num_tokens,
                    lease.hint(i),
                    "" if i < lease.roots.num_public else owner_tag(lease.namespace.owner),
                    lease.session_of(i),
                ),
                # A public head has a chain of its own: it may be evicted before what follows it.
                None if i in (0, lease.roots.num_public) else int(canonical[i - 1]),
                now,
            )
            taken.append(block_id)
            if i < num_full:
                new.append(i)
        self._announce(lease, new)
        return taken

    def _announce(self, lease: Lease, numbers: list[int]) -> None:
        """Send an event for each run of blocks of a lease, given by their numbers in ascending order."""
        if self.events is None:
            return
        size = self._block_size
        for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
            run = [number for _, number in group]
            first, end = run[0], run[-1] + 1
            stored = BlocksStored(
                tuple(lease.key(i) for i in run),
                lease.key(first - 1) if first else None,
                lease.tokens[first * size : end * size].copy(),
                lease.namespace,
            )
            self.events.put(stored)

    def _describe(self, block_ids: BlockIds) -> list[DeviceBlock]:
        return [self._records.describe(i) for i in block_ids.tolist()]

    def _drop(
        self, block_ids: BlockIds, blocks: list[DeviceBlock], reason: MissReason, cause: str = ""
    ) -> None:
        """Free blocks that left the index, and remember their ghosts."""
        keys = tuple(block.key for block in blocks if block.num_tokens == self._block_size)
        if self._on_left is not None:
            self._on_left(keys)
        self._records.drop(blocks, reason, self._clock(), cause)
        self.ahead.drop(block_ids)
        self._allocator.free(block_ids)
        self.version += 1
        if self.events is not None and keys:
            self.events.put(BlocksRemoved(keys, Tier.DEVICE))
