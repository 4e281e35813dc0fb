"""Device blocks that leases hold: how a lease gets them, commits them to the index, and frees them.

A lease holds one reference on every block of its table, and one pin on every block that it has committed.
Pins, and the tails that leases still write, change only here, and only here are blocks of leases freed.
`cached_blocks.py` keeps the index's own references, `late_frees.py` knows which frees wait.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from stemma.errors import IntegrityError
from stemma.memory.cache.cached_blocks import CachedBlocks
from stemma.memory.cache.late_frees import LateFrees
from stemma.memory.cache.lease import Lease
from stemma.memory.cache.states import CachedStates
from stemma.memory.device.allocator import BlockAllocator
from stemma.types import BlockIds

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


class BlockBuffer(Protocol):
    """The part of the device buffer (`memory/device/kv.py`) that the cache needs."""

    num_blocks: int

    def copy_block_head(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of a block, in all layers."""

    def touch(self, block_id: int) -> None:
        """Have memory given to a block that was never used."""


class LeasedBlocks:
    """The leases of one cache. Not thread-safe: one owner, the step loop."""

    def __init__(
        self,
        block_size: int,
        buffer: BlockBuffer,
        allocator: BlockAllocator,
        cached: CachedBlocks | None,
        states: CachedStates | None = None,
    ) -> None:
        """`cached` None: nothing is committed. `states`: what leases hold beside blocks; None: nothing."""
        self.block_size = block_size
        self.num_deduplicated = 0
        """Blocks that leases freed for identical ones of the index."""
        self.num_copied_heads = 0
        self._buffer = buffer
        self._allocator = allocator
        self._cached = cached
        self._states = states
        self._leases: set[Lease] = set()
        self._tails: dict[Lease, int] = {}
        """Partial blocks that a lease has committed and still writes: evicting one frees no memory yet."""
        self._late = LateFrees()

    @property
    def num_available(self) -> int:
        """Number of blocks that are free or evictable. O(leases whose partial tail is cached)."""
        if self._cached is None:
            return self._allocator.num_free
        num_in_use = sum(map(self._cached.has, self._tails.values()))
        num_spare = 0 if self._states is None else self._states.num_spare_blocks
        return self._allocator.num_free + self._cached.index.num_evictable - num_in_use + num_spare

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All leases, those included whose blocks are freed later."""
        return (*self._leases, *self._late.leases())

    def allocate(self, num_blocks: int) -> BlockIds | None:
        """Return fresh blocks, evicting as many as needed; None if that isn't enough."""
        if num_blocks > self.num_available:
            return None
        while (num_missing := num_blocks - self._allocator.num_free) > 0:
            # Evicted blocks that a lease still holds free no memory yet, so one round may not be enough.
            if not self._make_room(num_missing):
                return None
        return self._allocator.allocate(num_blocks)

    def _make_room(self, num_blocks: int) -> bool:
        """Evict up to so many blocks, or whose turn it is before; False: nothing can go."""
        if self._cached is None:
            return False
        if self._states is None:
            return self._cached.evict(num_blocks) > 0
        return self._states.make_room(num_blocks)

    def evict_all(self) -> None:
        """Evict all that no lease holds, so that whole slabs are empty."""
        while self._make_room(self._allocator.num_blocks):
            pass

    def copy_head(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of a block."""
        self._buffer.copy_block_head(source, target, num_tokens)
        self.num_copied_heads += 1

    def share(self, lease: Lease, block_ids: BlockIds) -> None:
        """Share these full blocks as the start of an empty lease; with reuse on, the index holds them."""
        self._allocator.acquire(block_ids)
        lease.append_blocks(block_ids)
        if self._cached is not None and len(block_ids):
            self._cached.index.pin(block_ids)
            lease.adopt_keys(self._cached.keys(block_ids))
            lease.num_committed = len(block_ids)

    def add(self, lease: Lease) -> None:
        """Register a lease that has its blocks; `free` ends it."""
        self._leases.add(lease)

    def heir(self, source: Lease, num_blocks: int, make: Callable[[], Lease]) -> Lease | None:
        """Return a lease with the blocks of `source`, which has none then, and fresh ones; None: no room."""
        fresh = _NO_BLOCKS
        if num_blocks > source.num_blocks:
            allocated = self.allocate(num_blocks - source.num_blocks)
            if allocated is None:
                return None
            fresh = allocated
        lease = make()
        lease.take_blocks(source)
        lease.append_blocks(fresh)
        self._leases.remove(source)
        self._leases.add(lease)
        if source in self._tails:
            self._tails[lease] = self._tails.pop(source)
        return lease

    def twin(
        self, source: Lease, num_computed: int, num_blocks: int, make: Callable[[], Lease]
    ) -> Lease | None:
        """Return a lease that shares the full blocks of `source` and has a copy of the rest of `num_computed`
        tokens; None if there is no room."""
        self.commit(source, num_computed)
        num_full, num_tail = divmod(num_computed, self.block_size)
        fresh = self.allocate(num_blocks - num_full)
        if fresh is None:
            return None
        lease = make()
        self.share(lease, source.block_table[:num_full])
        lease.append_blocks(fresh)
        if num_tail:
            try:
                self.copy_head(int(source.block_table[num_full]), int(fresh[0]), num_tail)
            except BaseException:
                self.free_blocks(lease)
                raise
        self._leases.add(lease)
        return lease

    def commit(self, lease: Lease, num_computed: int, *, tail: bool = False) -> None:
        """Enter the blocks of the leading `num_computed` tokens into the index, with `tail` the partial one.

        Where the index already holds an identical block, the lease switches to it and frees its own.
        """
        num_full = num_computed // self.block_size
        num_tail = num_computed % self.block_size if tail else 0
        if self._cached is None or not (num_full > lease.num_committed or num_tail):
            return
        entered = self._cached.enter(lease, num_full, num_tail)
        canonical = entered.canonical
        own = lease.block_table[lease.num_committed : num_full]
        duplicates = canonical != own
        if duplicates.any():
            self._allocator.acquire(canonical[duplicates])
            freed = own[duplicates]
            if self._late.has_fence:
                self._late.duplicates_after_step(freed)
            else:
                self._allocator.free(freed)
            own[:] = canonical
            self.num_deduplicated += len(freed)
        self._cached.index.pin(canonical)
        lease.num_committed = num_full
        self._tails.pop(lease, None)
        if num_tail and self._cached.has(int(lease.block_table[num_full])):
            self._tails[lease] = int(lease.block_table[num_full])
        self._cached.copy_down(entered.added)
        self.keep_quotas()

    def free(self, lease: Lease, num_computed: int) -> None:
        """Commit what was computed and free all blocks, even if the commit raises; some are freed late."""
        self._leases.remove(lease)
        if lease.pending is not None:
            if not lease.pending.num_loaded.cancel() and not lease.pending.num_loaded.done():
                # A load still writes into these blocks: keep them until it has ended.
                self._late.after_load(lease)
                return
            lease.pending = None
            self.free_blocks(lease)
            return
        try:
            self.commit(lease, num_computed, tail=True)
            if self._states is not None:
                self._states.tell()
        finally:
            if self._late.has_fence:
                self._late.after_step(lease)
            else:
                self.free_blocks(lease)

    def free_blocks(self, lease: Lease) -> None:
        """Unpin and free the blocks of a lease that isn't registered, and its recurrent state, now."""
        if self._cached is not None:
            held = lease.block_table[: lease.num_committed]
            if lease.retention.renews:
                self._cached.renew_hints(lease, held)
                if self._states is not None:
                    self._states.renew_hints(lease)
            self._cached.index.unpin(held)
        if self._states is not None:
            self._states.end(lease)
        self._allocator.free(lease.block_table)
        self._tails.pop(lease, None)
        lease.num_blocks = lease.num_committed = 0
        self.keep_quotas()

    def keep_quotas(self) -> None:
        """Evict what owners hold beyond their quotas; what requests hold stays."""
        if self._states is not None:
            self._states.keep_quotas()
        elif self._cached is not None:
            self._cached.keep_quotas()

    def loads(self) -> list[Future[int]]:
        """Return the loads that still write into blocks, of waiting leases and of freed ones."""
        pending = [lease.pending for lease in (*self._leases, *self._late.loading)]
        return [one.num_loaded for one in pending if one is not None and not one.num_loaded.done()]

    @property
    def has_loads_of_freed(self) -> bool:
        """Whether blocks of freed leases are still written into."""
        return bool(self._late.loading)

    def free_loaded(self) -> None:
        """Free the blocks of freed leases whose load has ended."""
        for lease in self._late.loaded():
            self._late.remove(lease)
            self.free_blocks(lease)

    @property
    def has_fence(self) -> bool:
        """Whether a step is under way."""
        return self._late.has_fence

    def open_fence(self) -> None:
        """Keep blocks that leases free from now on until `close_fence`."""
        self._late.open_fence()

    def close_fence(self) -> None:
        """Free what was kept for the oldest step under way."""
        fence = self._late.close_fence()
        for lease in fence.leases:
            self.free_blocks(lease)
        for block_ids in fence.duplicates:
            self._allocator.free(block_ids)

    def check(self) -> None:
        """Raise IntegrityError unless index, records, leases and allocator agree (slow)."""
        self._allocator.check()
        present = np.zeros(self._allocator.num_blocks, dtype=np.bool_)
        if self._cached is not None:
            self._cached.check()
            present = self._cached.present()
        expected = present.astype(np.int32)
        for block_ids in self._late.duplicates():
            expected[block_ids] += 1
        for lease in (*self._leases, *self._late.leases()):
            expected[lease.block_table] += 1
            if not present[lease.block_table[: lease.num_committed]].all():
                raise IntegrityError("a lease counts a block as committed that is not in the index")
        if not np.array_equal(expected, self._allocator.counts()):
            wrong = np.flatnonzero(expected != self._allocator.counts()).tolist()
            raise IntegrityError(f"reference counts of blocks {wrong} don't match their holders")
        num_single = int(np.count_nonzero(present & (expected == 1)))
        num_single += 0 if self._states is None else self._states.num_spare_blocks
        if self.num_available > self._allocator.num_free + num_single:
            raise IntegrityError("more blocks count as available than eviction can free")
