"""`PrefixCache`: the one façade that the engine sees. match -> reserve -> commit -> free.

It joins the prefix index (which tokens are computed), the block allocator (who holds which block), the
device buffer (where the bytes are) and, where there are any, the tiers below. References: the index holds
one on each of its blocks, each lease one on every block of its table. A block is free when nobody holds it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stemma.errors import IntegrityError, StorageError
from stemma.memory.blocks import BlockAllocator
from stemma.memory.lease import Lease, PendingLoad
from stemma.memory.lower import DeviceBlock, LowerTiers, Prefetch, TransferStats
from stemma.memory.records import BlockRecords
from stemma.prefix.draw import Decode, draw_tree
from stemma.prefix.explain import DISABLED_MISS, Miss, MissReason
from stemma.prefix.index import Match, PrefixIndex
from stemma.prefix.keys import KeySpace, Namespace, chain_keys, partial_key
from stemma.prefix.radix import RadixIndex
from stemma.types import BlockIds, BlockKey, Tier, TokenArray

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)
_NO_MATCH = Match(0, _NO_BLOCKS)


class BlockBuffer(Protocol):
    """The device buffer, as far as the façade needs it (`memory/device.py`)."""

    num_blocks: int

    def copy_block_head(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of a block, in all layers."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Gauges now and counters since the start."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_evictable_blocks: int
    num_evicted_blocks: int
    num_deduplicated_blocks: int
    num_copied_heads: int
    num_ghosts: int


@dataclass(slots=True)
class _Fence:
    """A step under way, and what was given up since it was launched: it may still use these blocks."""

    leases: list[Lease] = field(default_factory=list)
    duplicates: list[BlockIds] = field(default_factory=list)


class PrefixCache:
    """KV of the past, found by prefix. Not thread-safe: one owner, the step loop."""

    def __init__(
        self,
        buffer: BlockBuffer,
        index: PrefixIndex | None,
        key_space: KeySpace,
        *,
        policy_name: str = "lru",
        lower: LowerTiers | None = None,
        takes_tails: bool = False,
        block_costs: npt.NDArray[np.float32] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index` None disables reuse: blocks are then only allocated and shared between forks.

        `block_costs` tells the policy what a block costs by depth, shape [num_blocks]; None: all equal.
        """
        self.block_size = key_space.block_size
        self.num_blocks = buffer.num_blocks
        self._buffer = buffer
        self._index = index
        self._key_space = key_space
        self._lower = lower
        self._takes_tails = takes_tails
        self._block_costs = block_costs
        self._clock = clock
        self._allocator = BlockAllocator(buffer.num_blocks)
        self._records = BlockRecords(buffer.num_blocks, self.block_size, policy_name)
        self._leases: set[Lease] = set()
        self._draining: list[Lease] = []
        self._fences: deque[_Fence] = deque()
        self._num_evicted = 0
        self._num_deduplicated = 0
        self._num_copied_heads = 0
        self.version = 0
        """Changes whenever a match may have changed."""

    @property
    def enabled(self) -> bool:
        """Whether finished blocks are kept and reused."""
        return self._index is not None

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence could hold at most."""
        return self.num_blocks * self.block_size

    @property
    def num_available(self) -> int:
        """Blocks that are free or could be made free by eviction."""
        return self._allocator.num_free + (self._index.num_evictable if self._index else 0)

    def match(self, namespace: Namespace, tokens: TokenArray) -> int:
        """Return how many leading tokens of a prompt lie on the device; never the last one. Read-only."""
        return self._match(namespace, tokens).num_tokens

    def reserve(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        num_new: int = 1,
        *,
        priority: int = 50,
        ttl_s: float | None = None,
    ) -> Lease | None:
        """Take the longest cached prefix of `tokens`, and room for the rest and `num_new` more.

        Full blocks that match are shared; a block that matches in part is copied (copy-on-write), so reuse
        is by the token. `lease.num_cached_tokens` says how many need no computing. Where lower tiers hold
        more, `lease.pending` is set: nothing may be computed before `finish_load`. Returns None if there is
        no room now; then nothing is held.
        """
        self._reap()
        found = self._match(namespace, tokens)
        lease = Lease(
            namespace,
            self._key_space.root(namespace),
            tokens,
            self.block_size,
            priority=priority,
            ttl_s=ttl_s,
        )
        num_full = found.num_full_blocks(self.block_size)
        shared = found.block_ids[:num_full]
        if self._index is not None and num_full:
            self._index.pin(shared)
            self._allocator.acquire(shared)
            lease.append_blocks(shared)
            lease.adopt_keys(self._records.keys(shared))
            lease.num_committed = num_full
        tiers, keys = self._lower_match(lease, found)
        num_tail = found.num_tokens % self.block_size if not tiers else 0
        num_needed = -(-(len(tokens) + num_new) // self.block_size) - num_full
        num_lost = 0
        fresh = self._allocate_with_head(num_needed, found, num_tail)
        if fresh is None and num_tail:
            # The block to copy from takes room itself: do without it.
            num_lost, num_tail = num_tail, 0
            fresh = self._allocate(num_needed)
        if fresh is None:
            self._let_go(lease)
            return None
        lease.append_blocks(fresh)
        num_cached = num_full * self.block_size + num_tail
        lease.cached_by_tier = {Tier.DEVICE: num_cached} if num_cached else {}
        if self._index is not None:
            self._index.touch(shared, self._clock())
            if self._lower is not None and num_full:
                self._lower.on_hit([self._records.describe(i) for i in shared.tolist()])
        if tiers and self._lower is not None:
            future = self._lower.load(keys[: len(tiers)], fresh[: len(tiers)].tolist())
            lease.pending = PendingLoad(num_full, tiers, future)
        else:
            lease.miss = self._explain(lease, found, num_lost)
        self._leases.add(lease)
        return lease

    @property
    def lower(self) -> LowerTiers | None:
        """The tiers below the device, if there are any."""
        return self._lower

    def hold(self, namespace: Namespace, tokens: TokenArray) -> Lease:
        """Return a lease on the full blocks of a prompt that lie on the device; it may be empty.

        Nothing is allocated, copied or loaded. `free(lease, lease.num_tokens)` gives it up.
        """
        num_full = 0
        if self._index is not None and len(tokens):
            found = self._index.match(namespace, tokens)
            num_full = found.num_full_blocks(self.block_size)
        held = tokens[: num_full * self.block_size]
        lease = Lease(namespace, self._key_space.root(namespace), held, self.block_size)
        if self._index is not None and num_full:
            shared = found.block_ids[:num_full]
            self._index.pin(shared)
            self._allocator.acquire(shared)
            lease.append_blocks(shared)
            lease.adopt_keys(self._records.keys(shared))
            lease.num_committed = num_full
        self._leases.add(lease)
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; return False if there is none (nothing taken)."""
        num_needed = -(-num_tokens // self.block_size) - lease.num_blocks
        if num_needed <= 0:
            return True
        fresh = self._allocate(num_needed)
        if fresh is None:
            return False
        lease.append_blocks(fresh)
        return True

    @property
    def must_probe(self) -> bool:
        """Whether lower tiers want `prefetch` for every prompt before it is reserved."""
        return self._lower is not None and self._lower.must_probe

    def prefetch(self, namespace: Namespace, tokens: TokenArray) -> Prefetch | None:
        """A prompt was queued: let the lower tiers look for what the device lacks of it."""
        if self._lower is None:
            return None
        found = self._match(namespace, tokens)
        num_full = found.num_full_blocks(self.block_size)
        wanted = tokens[: (len(tokens) - 1) // self.block_size * self.block_size]
        root = self._key_space.root(namespace)
        keys = chain_keys(root, wanted, self.block_size)
        keys += self._tail_key([root, *keys][-1], tokens, found)
        return self._lower.prefetch([root, *keys][num_full], keys[num_full:])

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step took so long for this many prompt tokens."""
        if self._lower is not None:
            self._lower.observe_prefill(num_tokens, seconds)

    def finish_load(self, lease: Lease) -> None:
        """Take over what a finished load brought, and commit it. What didn't arrive is to be computed."""
        pending, lease.pending = lease.pending, None
        assert pending is not None
        assert pending.num_loaded.done()
        num_loaded = 0
        if not pending.num_loaded.cancelled():
            error = pending.num_loaded.exception()
            if error is None:
                num_loaded = pending.num_loaded.result()
            elif isinstance(error, StorageError):
                lease.load_error = str(error)
            else:
                raise error
        for number, tier in enumerate(pending.tiers[:num_loaded], pending.first):
            # The last token is always computed, even where its block was loaded.
            num_tokens = min(self.block_size, lease.num_tokens - 1 - number * self.block_size)
            lease.cached_by_tier[tier] = lease.cached_by_tier.get(tier, 0) + num_tokens
        self.commit(lease, lease.num_cached_tokens)
        found = Match(lease.num_cached_tokens, lease.block_table[: pending.first + num_loaded])
        lease.miss = self._explain(lease, found, 0)

    def abandoned_loads(self) -> list[Future[int]]:
        """Return the loads that still write into blocks whose lease is gone."""
        return [lease.pending.num_loaded for lease in self._draining if lease.pending is not None]

    def commit(self, lease: Lease, num_computed: int, *, tail: bool = False) -> None:
        """Enter blocks whose KV is complete in the index; O(1) until another block is full.

        `num_computed` leading tokens of the lease have their KV. Where the index holds an identical block
        already, the lease switches to it and its own is released. With `tail`, the partial last block
        enters too; the lease may go on writing behind those tokens.
        """
        num_full = num_computed // self.block_size
        num_tail = num_computed % self.block_size if tail else 0
        if self._index is None or not (num_full > lease.num_committed or num_tail):
            return
        size, first = self.block_size, lease.num_committed
        tail_key = None
        if num_tail:
            tail_tokens = lease.tokens[num_full * size : num_computed]
            tail_key = partial_key(lease.key(num_full - 1), tail_tokens)
        num_offered = num_full + (1 if num_tail else 0)
        offered = lease.block_table[:num_offered]
        inserted = self._index.insert(
            lease.namespace,
            lease.tokens[: num_full * size + num_tail],
            offered,
            self._clock(),
            lease.traits(num_full, tail=tail_key, costs=self._block_costs),
        )
        self._allocator.acquire(inserted.added)
        for block_id in inserted.dropped.tolist():
            self._records.remove(block_id)
        self._allocator.release(inserted.dropped)
        self._record(lease, inserted.canonical, num_full, tail_key, num_tail)
        canonical = inserted.canonical[first:num_full]
        duplicates = canonical != offered[first:num_full]
        if duplicates.any():
            self._allocator.acquire(canonical[duplicates])
            if self._fences:
                self._fences[-1].duplicates.append(offered[first:num_full][duplicates].copy())
            else:
                self._allocator.release(offered[first:num_full][duplicates])
            lease.block_table[first:num_full] = canonical
            self._num_deduplicated += int(duplicates.sum())
        self._index.pin(canonical)
        lease.num_committed = num_full
        self.version += 1

    def fork(self, lease: Lease, num_computed: int) -> Lease | None:
        """Return a second lease on the same tokens: full blocks shared, the partial one copied.

        None if no block is free for the copy and the next token.
        """
        self.commit(lease, num_computed)
        size = self.block_size
        num_full, num_tail = divmod(num_computed, size)
        fresh = self._allocate(-(-(lease.num_tokens + 1) // size) - num_full)
        if fresh is None:
            return None
        twin = Lease(
            lease.namespace,
            lease.root,
            lease.tokens,
            size,
            priority=lease.priority,
            ttl_s=lease.ttl_s,
        )
        shared = lease.block_table[:num_full]
        self._allocator.acquire(shared)
        twin.append_blocks(shared)
        twin.append_blocks(fresh)
        if self._index is not None:
            self._index.pin(shared)
            twin.adopt_keys(lease.keys(num_full))
            twin.num_committed = num_full
        if num_tail:
            self._copy_head(int(lease.block_table[num_full]), int(fresh[0]), num_tail)
        twin.cached_by_tier = dict(lease.cached_by_tier)
        twin.miss = lease.miss
        self._leases.add(twin)
        return twin

    def free(self, lease: Lease, num_computed: int) -> None:
        """Give up everything the lease holds; what was computed, the partial tail included, stays cached."""
        self._leases.remove(lease)
        if lease.pending is not None:
            if not lease.pending.num_loaded.cancel() and not lease.pending.num_loaded.done():
                # Someone still writes into these blocks: keep them until that is over.
                self._draining.append(lease)
                return
            lease.pending = None
        else:
            self.commit(lease, num_computed, tail=True)
            if self._fences:
                self._fences[-1].leases.append(lease)
                return
        self._let_go(lease)

    @property
    def has_fence(self) -> bool:
        """Whether a step is under way, see `open_fence`."""
        return bool(self._fences)

    def open_fence(self) -> None:
        """A step was launched: what leases give up from now on is held until `close_fence`.

        By then the step may still read and write those blocks, and whatever comes next may run beside it.
        """
        self._fences.append(_Fence())

    def close_fence(self) -> None:
        """The oldest step under way is over."""
        fence = self._fences.popleft()
        for lease in fence.leases:
            self._let_go(lease)
        for block_ids in fence.duplicates:
            self._allocator.release(block_ids)

    def close(self) -> None:
        """Close the lower tiers, once their queued writes are done. The cache isn't used afterwards."""
        if self._lower is not None:
            self._lower.close()

    def flush(self) -> int:
        """Drop every block that no lease holds; return how many."""
        self._reap()
        if self._index is None:
            return 0
        dropped = self._index.evict(self._index.num_evictable, self._clock())
        self._bury(dropped, MissReason.FLUSHED)
        self._allocator.release(dropped)
        self.version += 1
        return len(dropped)

    def continuation(self, namespace: Namespace, tokens: TokenArray, max_tokens: int) -> TokenArray:
        """Return up to `max_tokens` tokens that followed `tokens` in the cache; empty if none did. Read-only.

        Only the radix index can tell.
        """
        if not isinstance(self._index, RadixIndex):
            return np.empty(0, dtype=np.int32)
        return self._index.continuation(namespace, tokens, max_tokens)

    def draw(self, decode: Decode, max_chars: int) -> str:
        """Return the index as a tree of text, at most `max_chars` of each edge."""
        if self._index is None:
            return "(the prefix cache is disabled)"
        if isinstance(self._index, RadixIndex):
            return draw_tree(self._index, decode, max_chars)
        tree = RadixIndex(self.block_size)
        for namespace, tokens, block_ids in self._index.walk():
            tree.insert(namespace, tokens, block_ids, now=0.0)
        return draw_tree(tree, decode, max_chars)

    def stats(self) -> CacheStats:
        """Return gauges and counters."""
        return CacheStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self._allocator.num_free,
            num_cached_blocks=self._index.num_blocks if self._index else 0,
            num_evictable_blocks=self._index.num_evictable if self._index else 0,
            num_evicted_blocks=self._num_evicted,
            num_deduplicated_blocks=self._num_deduplicated,
            num_copied_heads=self._num_copied_heads,
            num_ghosts=self._records.num_ghosts,
        )

    def transfer_stats(self) -> TransferStats | None:
        """Return what the lower tiers did; None without them."""
        return self._lower.stats() if self._lower is not None else None

    def check(self) -> None:
        """Prove that index, records, leases and allocator agree on who holds what (slow)."""
        self._allocator.check()
        present = self._records.present()
        if self._index is not None:
            self._index.check()
            if self._index.num_blocks != int(present.sum()):
                raise IntegrityError(f"{self._index.num_blocks} in the index, {present.sum()} recorded")
        expected = present.astype(np.int32)
        for block_ids in [ids for fence in self._fences for ids in fence.duplicates]:
            expected[block_ids] += 1
        given_up = [lease for fence in self._fences for lease in fence.leases]
        for lease in [*self._leases, *self._draining, *given_up]:
            expected[lease.block_table] += 1
            if not present[lease.block_table[: lease.num_committed]].all():
                raise IntegrityError("a lease counts a block as committed that is not in the index")
        if not np.array_equal(expected, self._allocator.counts()):
            wrong = np.flatnonzero(expected != self._allocator.counts()).tolist()
            raise IntegrityError(f"reference counts of blocks {wrong} don't match their holders")

    def _match(self, namespace: Namespace, tokens: TokenArray) -> Match:
        if self._index is None or len(tokens) < 2:
            return _NO_MATCH
        return self._index.match(namespace, tokens[:-1])

    def _lower_match(self, lease: Lease, found: Match) -> tuple[tuple[Tier, ...], list[BlockKey]]:
        """Return the tiers of the leading blocks that lower tiers have beyond `found`, and all keys asked."""
        if self._lower is None:
            return (), []
        last = (lease.num_tokens - 1) // self.block_size
        keys = [lease.key(i) for i in range(found.num_full_blocks(self.block_size), last)]
        keys += self._tail_key(lease.key(last - 1), lease.tokens, found)
        return tuple(self._lower.match(keys)), keys

    def _tail_key(self, parent: BlockKey, tokens: TokenArray, found: Match) -> list[BlockKey]:
        """Return the key of the block that the prompt's last token lies in, as a prefill server publishes it.

        Nothing if we don't ask for such blocks, or the device has all of it but the last token.
        """
        tail = tokens[(len(tokens) - 1) // self.block_size * self.block_size :]
        if not self._takes_tails or len(tail) < 2 or found.num_tokens >= len(tokens) - 1:
            return []
        return [partial_key(parent, tail)]

    def _allocate(self, num_blocks: int) -> BlockIds | None:
        """Return fresh blocks, evicting what is needed; None if that isn't enough."""
        if num_blocks > self.num_available:
            return None
        while (num_missing := num_blocks - self._allocator.num_free) > 0:
            # Evicted blocks that a lease still holds give no room yet, so one round may not be enough.
            evicted = self._index.evict(num_missing, self._clock()) if self._index else _NO_BLOCKS
            if not len(evicted):
                return None
            self._bury(evicted, MissReason.EVICTED)
            self._num_evicted += len(evicted)
            self._allocator.release(evicted)
            self.version += 1
        return self._allocator.allocate(num_blocks)

    def _allocate_with_head(self, num_blocks: int, found: Match, num_head: int) -> BlockIds | None:
        """Allocate, and copy the matched head of the last matched block into the first fresh one."""
        if not num_head:
            return self._allocate(num_blocks)
        source = found.block_ids[-1:]
        self._allocator.acquire(source)  # making room may evict it, but must not reuse it yet
        fresh = self._allocate(num_blocks)
        if fresh is not None:
            self._copy_head(int(source[0]), int(fresh[0]), num_head)
            if self._index is not None and self._records.num_tokens(int(source[0])):
                self._index.touch(source, self._clock())
        self._allocator.release(source)
        return fresh

    def _copy_head(self, source: int, target: int, num_tokens: int) -> None:
        self._buffer.copy_block_head(source, target, num_tokens)
        self._num_copied_heads += 1

    def _record(
        self, lease: Lease, canonical: BlockIds, num_full: int, tail_key: BlockKey | None, num_tail: int
    ) -> None:
        """Note the blocks that the index took from this lease; one may have grown since it was noted."""
        table, taken = lease.block_table, []
        for i in range(lease.num_committed, len(canonical)):
            block_id = int(table[i])
            num_tokens = self.block_size if i < num_full else num_tail
            if canonical[i] != block_id or self._records.num_tokens(block_id) == num_tokens:
                continue
            key = lease.key(i) if i < num_full or tail_key is None else tail_key
            self._records.remove(block_id)
            self._records.add(
                DeviceBlock(block_id, key, lease.key(i - 1), num_tokens, lease.priority, lease.ttl_s),
                int(canonical[i - 1]) if i else None,
            )
            taken.append(block_id)
        if self._lower is not None and taken:
            self._lower.on_commit([self._records.describe(i) for i in taken])

    def _bury(self, block_ids: BlockIds, reason: MissReason) -> None:
        """Tell the lower tiers, and remember the ghosts, of blocks that left the index."""
        blocks = [self._records.describe(i) for i in block_ids.tolist()]
        if self._lower is not None and reason is MissReason.EVICTED:
            self._lower.on_evict(blocks)
        self._records.bury(blocks, reason, self._clock())

    def _explain(self, lease: Lease, found: Match, num_lost: int) -> Miss:
        if self._index is None:
            return DISABLED_MISS
        return self._records.explain(lease, found, num_lost, self._clock())

    def _let_go(self, lease: Lease) -> None:
        """Unpin and release the blocks of a lease that is no longer registered."""
        if self._index is not None:
            self._index.unpin(lease.block_table[: lease.num_committed])
        self._allocator.release(lease.block_table)
        lease.num_blocks = lease.num_committed = 0

    def _reap(self) -> None:
        """Let go of freed leases whose load is over by now."""
        for lease in [one for one in self._draining if one.pending and one.pending.num_loaded.done()]:
            self._draining.remove(lease)
            self._let_go(lease)
