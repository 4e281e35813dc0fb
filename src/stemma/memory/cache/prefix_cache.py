"""`PrefixCache`: the one façade that the engine sees. match -> reserve -> commit -> free.

It joins the prefix index (which tokens are computed), the block allocator (who holds which block), the
device buffer (where the bytes are) and, where there are any, the tiers below. References: the index holds
one on each of its blocks, each lease one on every block of its table. A block is free when nobody holds it.

This file manages leases. `cached_blocks.py` decides what enters and leaves the index, `prompt_loads.py` what
a prompt gets from the tiers below the device, and `tiers_below.py` is what an operator asks of these.
`rests.py` knows which leases others may go on from.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stemma.errors import IntegrityError
from stemma.memory.cache.cached_blocks import CachedBlocks
from stemma.memory.cache.elsewhere import Elsewhere, OtherModels
from stemma.memory.cache.lease import Lease
from stemma.memory.cache.prompt_loads import PromptLoads
from stemma.memory.cache.rests import Rests
from stemma.memory.cache.tiers_below import TiersBelow
from stemma.memory.device.allocator import BlockAllocator
from stemma.memory.kv_events import KVEventSink
from stemma.memory.tiers.loads import Prefetch
from stemma.memory.tiers.lower import LowerTiers
from stemma.prefix.explain import (
    DISABLED_MISS,
    LAST_TOKEN_MISS,
    RECOMPUTED_MISS,
    Miss,
    MissReason,
    load_failed,
)
from stemma.prefix.index import Match, PrefixIndex
from stemma.prefix.keys import KeySpace, Namespace
from stemma.types import DEFAULT_PRIORITY, BlockIds, RetentionRange, Tier, TokenArray

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)
_NO_MATCH = Match(0, _NO_BLOCKS)


class BlockBuffer(Protocol):
    """The part of the device buffer (`memory/device/kv.py`) that the façade needs."""

    num_blocks: int

    def copy_block_head(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of a block, in all layers."""

    def touch(self, block_id: int) -> None:
        """Have memory given to a block that was never used."""


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
    num_policy_failures: int = 0
    """How often the eviction policy raised and LRU took over: 0, or 1."""
    num_regretted_blocks: int = 0
    """Evicted blocks that came back within a minute."""


@dataclass(slots=True)
class _Fence:
    """A step under way, and what was freed since it was launched: the step may still use these blocks."""

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
        other_models: OtherModels | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index` None disables reuse: blocks are then only allocated and shared between forks.

        `other_models` knows the prompts that other models left on the disk, for explanations.

        `block_costs` tells the policy what a block costs by depth, shape [num_blocks]; None: all equal.
        """
        self.block_size = key_space.block_size
        self.num_blocks = buffer.num_blocks
        self.buffer = buffer
        self.key_space = key_space
        self._lower = lower
        self.below = TiersBelow(lower)
        """The tiers below the device, for the operator and for any thread."""
        self._loads = None if lower is None else PromptLoads(lower, key_space, takes_tails=takes_tails)
        self._allocator = BlockAllocator(buffer.num_blocks)
        self._cached = None
        if index is not None:
            self._cached = CachedBlocks(
                index, self._allocator, lower, policy_name=policy_name, block_costs=block_costs, clock=clock
            )
        self._elsewhere = Elsewhere(self.block_size, other_models)
        self._leases: set[Lease] = set()
        self._held: set[Lease] = set()
        """Those of `hold`."""
        self._tails: dict[Lease, int] = {}
        """Partial blocks that a lease has committed and still writes: evicting one frees no memory yet."""
        self._draining: list[Lease] = []
        self._rests = Rests()
        self._fences: deque[_Fence] = deque()
        self._num_deduplicated = 0
        self._num_copied_heads = 0
        self._num_touched = 0
        """Leading blocks that were used or touched, as far as `touch_ahead` looked."""

    @property
    def version(self) -> int:
        """Changes whenever a match may have changed."""
        return self._cached.version if self._cached is not None else 0

    @property
    def enabled(self) -> bool:
        """Whether finished blocks are kept and reused."""
        return self._cached is not None

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of tokens that one sequence can hold."""
        return self.num_blocks * self.block_size

    @property
    def num_available(self) -> int:
        """Number of blocks that are free or evictable. O(leases whose partial tail is cached)."""
        if self._cached is None:
            return self._allocator.num_free
        num_in_use = sum(map(self._cached.has, self._tails.values()))
        return self._allocator.num_free + self._cached.index.num_evictable - num_in_use

    def max_tokens(self, namespace: Namespace, tokens: TokenArray) -> int:
        """Return the maximum length of a sequence that begins with `tokens`, given what `hold` keeps.

        This assumes that no other request runs. Held blocks count only if the sequence shares them.
        """
        kept = {block_id for lease in self._held for block_id in lease.block_table.tolist()}
        num_blocks = self.num_blocks - len(kept)
        if kept:
            found = self._match(namespace, tokens)
            shared = found.block_ids[: found.num_full_blocks(self.block_size)].tolist()
            num_blocks += len(kept.intersection(shared))
        return num_blocks * self.block_size

    def match(self, namespace: Namespace, tokens: TokenArray) -> int:
        """Return how many leading tokens of a prompt are on the device, never the last one. Read-only."""
        return self._match(namespace, tokens).num_tokens

    def reserve(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        num_new: int = 1,
        *,
        priority: int = DEFAULT_PRIORITY,
        ttl_s: float | None = None,
        retention: Sequence[RetentionRange] = (),
        max_cached: int | None = None,
    ) -> Lease | None:
        """Lease the longest cached prefix of `tokens`, and blocks for the rest and `num_new` more tokens.

        Full blocks that match are shared; a block that matches in part is copied (copy-on-write), so reuse
        is by the token. `lease.num_cached_tokens` tokens need no computing. If lower tiers hold more,
        `lease.pending` is set: compute nothing before `finish_load`. Returns None, holding nothing, if there
        is no room now. `max_cached`: take no more tokens than that, from the device alone, because the rest
        is to be computed whatever is cached. `retention`: hints of leading tokens; `priority` and `ttl_s` are
        those of the rest.
        """
        self._free_loaded()
        make = partial(
            Lease, namespace, self.key_space, tokens, priority=priority, ttl_s=ttl_s, retention=retention
        )
        if self._rests and max_cached is None:
            lease = self._go_on(namespace, tokens, num_new, make)
            if lease is not None:
                return lease
        found = self._match(namespace, tokens if max_cached is None else tokens[: max_cached + 1])
        lease = make()
        num_full = found.num_full_blocks(self.block_size)
        shared = found.block_ids[:num_full]
        self._share(lease, shared)
        try:
            is_reserved = self._fill(lease, found, num_new, loads=self._loads if max_cached is None else None)
        except BaseException:
            self._free(lease)
            raise
        if not is_reserved:
            self._free(lease)
            return None
        if max_cached is not None and self._cached is not None:
            lease.miss = RECOMPUTED_MISS
        self._leases.add(lease)
        return lease

    def _go_on(
        self, namespace: Namespace, tokens: TokenArray, num_new: int, make: Callable[[], Lease]
    ) -> Lease | None:
        """Lease `tokens` from where a request rests that had all of them but the last; None: there is none.

        The first to go on takes its blocks; others share the full ones and copy the rest, as `fork` does.
        Nothing is looked up, and the eviction policy isn't told: for it, all of these are one request.
        """
        known = tokens[:-1]
        rest = self._rests.find(namespace, known)
        if rest is None:
            return None
        num_blocks = -(-(len(tokens) + num_new) // self.block_size)
        if rest.is_taken:
            lease = self._twin(rest.lease, len(known), num_blocks, make)
        else:
            lease = self._heir(rest.lease, num_blocks, make)
        if lease is not None:
            lease.cached_by_tier = {Tier.DEVICE: len(known)}
            lease.miss = LAST_TOKEN_MISS
        return lease

    def _heir(self, source: Lease, num_blocks: int, make: Callable[[], Lease]) -> Lease | None:
        """Return a lease with the blocks of `source`, which has none then, and fresh ones; None: no room."""
        fresh = _NO_BLOCKS
        if num_blocks > source.num_blocks:
            allocated = self._allocate_now(num_blocks - source.num_blocks)
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
        self._rests.hand_over(source, lease)
        return lease

    def _twin(
        self, source: Lease, num_computed: int, num_blocks: int, make: Callable[[], Lease]
    ) -> Lease | None:
        """Return a lease that shares the full blocks of `source` and has a copy of the rest of `num_computed`
        tokens; None if there is no room."""
        self.commit(source, num_computed)
        num_full, num_tail = divmod(num_computed, self.block_size)
        fresh = self._allocate_now(num_blocks - num_full)
        if fresh is None:
            return None
        lease = make()
        self._share(lease, source.block_table[:num_full])
        lease.append_blocks(fresh)
        if num_tail:
            try:
                self._copy_head(int(source.block_table[num_full]), int(fresh[0]), num_tail)
            except BaseException:
                self._free(lease)
                raise
        self._leases.add(lease)
        return lease

    def _fill(self, lease: Lease, found: Match, num_new: int, *, loads: PromptLoads | None) -> bool:
        """Allocate the other blocks of a lease that shares what `found` has; False if there is no room."""
        num_full = found.num_full_blocks(self.block_size)
        tiers, keys = loads.match(lease, found) if loads is not None else ((), [])
        num_tail = found.num_tokens % self.block_size if not tiers else 0
        num_needed = -(-(lease.num_tokens + num_new) // self.block_size) - num_full
        num_lost = 0
        fresh = self._allocate_with_head(num_needed, found, num_tail)
        if fresh is None and num_tail:
            # Holding the block to copy from may be what leaves no room: retry without the copy.
            num_lost, num_tail = num_tail, 0
            fresh = self._allocate(num_needed)
        if fresh is None:
            return False
        lease.append_blocks(fresh)
        num_cached = num_full * self.block_size + num_tail
        lease.cached_by_tier = {Tier.DEVICE: num_cached} if num_cached else {}
        if self._cached is not None:
            self._cached.use(found.block_ids[:num_full])
        if loads is not None and tiers:
            loads.start(lease, num_full, tiers, keys)
        else:
            lease.miss = self._explain(lease, found, num_lost)
        return True

    def hold(self, namespace: Namespace, tokens: TokenArray) -> Lease:
        """Return a lease on the full blocks of a prompt that are on the device; it may be empty.

        Nothing is allocated, copied or loaded. `free(lease, lease.num_tokens)` frees it.
        """
        found = _NO_MATCH
        if self._cached is not None and len(tokens):
            found = self._cached.index.match(namespace, tokens)
        num_full = found.num_full_blocks(self.block_size)
        held = tokens[: num_full * self.block_size]
        lease = Lease(namespace, self.key_space, held)
        self._share(lease, found.block_ids[:num_full])
        self._leases.add(lease)
        self._held.add(lease)
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in total; return False, taking nothing, if there is none."""
        num_needed = -(-num_tokens // self.block_size) - lease.num_blocks
        if num_needed <= 0:
            return True
        fresh = self._allocate(num_needed)
        if fresh is None:
            return False
        lease.append_blocks(fresh)
        return True

    def touch_ahead(self, num_blocks: int) -> bool:
        """Touch one of the `num_blocks` blocks that come into use next; return whether there was one.

        A block's first use takes milliseconds, since the system gives memory then. This takes as long.
        """
        first = self._allocator.first_unused
        self._num_touched = max(self._num_touched, first)
        if self._num_touched >= min(first + num_blocks, self.num_blocks):
            return False
        self.buffer.touch(self._num_touched)
        self._num_touched += 1
        return True

    @property
    def must_probe(self) -> bool:
        """Whether lower tiers want `prefetch` for every prompt before it is reserved."""
        return self._lower is not None and self._lower.must_probe

    def prefetch(self, namespace: Namespace, tokens: TokenArray) -> Prefetch | None:
        """Let the lower tiers look for the blocks of a queued prompt that the device lacks."""
        if self._loads is None:
            return None
        return self._loads.prefetch(namespace, tokens, self._match(namespace, tokens))

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Report that a step took `seconds` for `num_tokens` prompt tokens."""
        if self._lower is not None:
            self._lower.observe_prefill(num_tokens, seconds)

    def finish_load(self, lease: Lease) -> None:
        """Commit the blocks that a finished load delivered. The rest must be computed."""
        assert self._loads is not None
        assert lease.pending is not None
        num_asked = lease.pending.first + len(lease.pending.tiers)
        num_held = self._loads.finish(lease)
        self.commit(lease, lease.num_cached_tokens)
        found = Match(lease.num_cached_tokens, lease.block_table[:num_held])
        if num_held < num_asked:
            lease.miss = load_failed(num_asked - num_held, lease.num_cached_tokens)
        else:
            lease.miss = self._explain(lease, found, 0)

    def loads(self) -> list[Future[int]]:
        """Return the loads that still write into blocks, of waiting leases and of freed ones."""
        pending = [lease.pending for lease in (*self._leases, *self._draining)]
        return [one.num_loaded for one in pending if one is not None and not one.num_loaded.done()]

    @property
    def has_loads_of_freed(self) -> bool:
        """Whether blocks of freed leases are still written into."""
        return bool(self._draining)

    def commit(self, lease: Lease, num_computed: int, *, tail: bool = False) -> None:
        """Enter blocks whose KV is complete into the index; O(1) until another block is full.

        The KV of the leading `num_computed` tokens is complete. If the index already holds an identical
        block, the lease switches to it and its own is freed. With `tail`, the partial last block enters
        too; the lease may go on writing after those tokens.
        """
        num_full = num_computed // self.block_size
        num_tail = num_computed % self.block_size if tail else 0
        if self._cached is None or not (num_full > lease.num_committed or num_tail):
            return
        entered = self._cached.enter(lease, num_full, num_tail)
        self._elsewhere.note(lease.namespace)
        canonical = entered.canonical
        own = lease.block_table[lease.num_committed : num_full]
        duplicates = canonical != own
        if duplicates.any():
            self._allocator.acquire(canonical[duplicates])
            freed = own[duplicates]
            if self._fences:
                self._fences[-1].duplicates.append(freed)
            else:
                self._allocator.free(freed)
            own[:] = canonical
            self._num_deduplicated += len(freed)
        self._cached.index.pin(canonical)
        lease.num_committed = num_full
        self._tails.pop(lease, None)
        if num_tail and self._cached.has(int(lease.block_table[num_full])):
            self._tails[lease] = int(lease.block_table[num_full])
        self._cached.copy_down(entered.added)
        self._cached.keep_quotas()

    def fork(self, lease: Lease, num_computed: int) -> Lease | None:
        """Return a second lease on the same tokens: full blocks shared, the partial one copied.

        None if no block is free for the copy and the next token.
        """
        make = partial(
            Lease,
            lease.namespace,
            self.key_space,
            lease.tokens,
            priority=lease.priority,
            ttl_s=lease.ttl_s,
            retention=lease.retention,
        )
        num_blocks = -(-(lease.num_tokens + 1) // self.block_size)
        twin = self._twin(lease, num_computed, num_blocks, make)
        if twin is None and self._rests:
            self.end_rests()
            twin = self._twin(lease, num_computed, num_blocks, make)
        if twin is None:
            return None
        twin.cached_by_tier = dict(lease.cached_by_tier)
        twin.miss = lease.miss
        return twin

    def free(self, lease: Lease, num_computed: int) -> None:
        """Free all blocks of the lease; what was computed, including the partial tail, stays cached.

        The blocks are freed even if the commit raises.
        """
        self._leases.remove(lease)
        self._held.discard(lease)
        self._rests.drop(lease)
        if lease.pending is not None:
            if not lease.pending.num_loaded.cancel() and not lease.pending.num_loaded.done():
                # A load still writes into these blocks: keep them until it has ended.
                self._draining.append(lease)
                return
            lease.pending = None
            self._free(lease)
            return
        try:
            self.commit(lease, num_computed, tail=True)
        finally:
            if self._fences:
                self._fences[-1].leases.append(lease)
            else:
                self._free(lease)

    def rest(self, lease: Lease, num_computed: int) -> None:
        """As `free`, but until `end_rests` the blocks wait for requests that go on with one token more.

        Those are spared a lookup and an entry in the index; blocks that are needed elsewhere don't wait.
        """
        if self._cached is None or self._fences or lease.pending is not None or not num_computed:
            self.free(lease, num_computed)
        else:
            self._rests.add(lease, num_computed)

    def end_rests(self) -> None:
        """Free what rests and nobody has gone on from."""
        while self._rests:
            rest = self._rests.pop()
            if not rest.is_taken:
                self.free(rest.lease, len(rest.tokens))

    @property
    def has_fence(self) -> bool:
        """Whether a step is under way, see `open_fence`."""
        return bool(self._fences)

    def open_fence(self) -> None:
        """Call when a step is launched: blocks that leases free from now on are kept until `close_fence`.

        Until then the step may still read and write them, and other work may run at the same time.
        """
        self._fences.append(_Fence())

    def close_fence(self) -> None:
        """Call when the oldest step under way has ended."""
        fence = self._fences.popleft()
        for lease in fence.leases:
            self._free(lease)
        for block_ids in fence.duplicates:
            self._allocator.free(block_ids)

    def close(self) -> None:
        """Close the lower tiers, once their queued writes are done. The cache isn't used afterwards."""
        if self._lower is not None:
            self._lower.close()

    def watch(self, sink: KVEventSink) -> None:
        """Tell `sink` of full blocks that enter and leave the tiers of this process from now on."""
        if self._cached is not None:
            self._cached.events = sink
        if self._lower is not None:
            self._lower.watch(sink)

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Set how many device blocks each owner (`Namespace.owner`) may hold; others hold any number.

        Whoever holds more loses own blocks at once, leaves first and the least recently used of them first,
        except those that requests hold; these go when the requests end.
        """
        if self._cached is not None:
            self._cached.set_quotas(quotas)

    def flush(self) -> int:
        """Drop every block that no lease holds; return how many."""
        self.end_rests()
        self._free_loaded()
        return self._cached.flush() if self._cached is not None else 0

    def continuation(self, namespace: Namespace, tokens: TokenArray, max_tokens: int) -> TokenArray:
        """Return up to `max_tokens` tokens that followed `tokens` in the cache; empty if none did. Read-only.

        Only the radix index can tell.
        """
        if self._cached is None:
            return _NO_BLOCKS
        return self._cached.index.continuation(namespace, tokens, max_tokens)

    @property
    def index(self) -> PrefixIndex | None:
        """The index of the device's cached blocks; read-only. None if the cache is disabled."""
        return self._cached.index if self._cached is not None else None

    def describe_blocks(self, block_ids: BlockIds) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint8]]:
        """Return seconds since the last use, [n], and keys, [n, 32], of cached blocks."""
        assert self._cached is not None
        return self._cached.describe(block_ids)

    def stats(self) -> CacheStats:
        """Return gauges and counters."""
        return CacheStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self._allocator.num_free,
            num_cached_blocks=self._cached.index.num_blocks if self._cached else 0,
            num_evictable_blocks=self._cached.index.num_evictable if self._cached else 0,
            num_evicted_blocks=self._cached.num_evicted if self._cached else 0,
            num_deduplicated_blocks=self._num_deduplicated,
            num_copied_heads=self._num_copied_heads,
            num_ghosts=self._cached.num_ghosts if self._cached else 0,
            num_policy_failures=self._cached.index.num_policy_failures if self._cached else 0,
            num_regretted_blocks=self._cached.num_regretted if self._cached else 0,
        )

    def check(self) -> None:
        """Verify that index, records, leases and allocator agree, and check the tiers below (slow)."""
        if self._lower is not None:
            self._lower.check()
        self._allocator.check()
        present = np.zeros(self.num_blocks, dtype=np.bool_)
        if self._cached is not None:
            self._cached.check()
            present = self._cached.present()
        expected = present.astype(np.int32)
        for block_ids in [ids for fence in self._fences for ids in fence.duplicates]:
            expected[block_ids] += 1
        fenced = [lease for fence in self._fences for lease in fence.leases]
        for lease in [*self._leases, *self._draining, *fenced]:
            expected[lease.block_table] += 1
            if not present[lease.block_table[: lease.num_committed]].all():
                raise IntegrityError("a lease counts a block as committed that is not in the index")
        if not np.array_equal(expected, self._allocator.counts()):
            wrong = np.flatnonzero(expected != self._allocator.counts()).tolist()
            raise IntegrityError(f"reference counts of blocks {wrong} don't match their holders")
        num_single = int(np.count_nonzero(present & (expected == 1)))
        if self.num_available > self._allocator.num_free + num_single:
            raise IntegrityError("more blocks count as available than eviction can free")

    def _match(self, namespace: Namespace, tokens: TokenArray) -> Match:
        if self._cached is None or len(tokens) < 2:
            return _NO_MATCH
        return self._cached.index.match(namespace, tokens[:-1])

    def _share(self, lease: Lease, block_ids: BlockIds) -> None:
        """Share these full blocks as the start of an empty lease; with reuse on, the index holds them."""
        self._allocator.acquire(block_ids)
        lease.append_blocks(block_ids)
        if self._cached is not None and len(block_ids):
            self._cached.index.pin(block_ids)
            lease.adopt_keys(self._cached.keys(block_ids))
            lease.num_committed = len(block_ids)

    def _allocate(self, num_blocks: int) -> BlockIds | None:
        """Return fresh blocks, evicting as many as needed, those that rest too; None if that isn't enough."""
        fresh = self._allocate_now(num_blocks)
        if fresh is None and self._rests:
            self.end_rests()
            fresh = self._allocate_now(num_blocks)
        return fresh

    def _allocate_now(self, num_blocks: int) -> BlockIds | None:
        """Return fresh blocks, evicting as many as needed; None if that isn't enough."""
        if num_blocks > self.num_available:
            return None
        while (num_missing := num_blocks - self._allocator.num_free) > 0:
            # Evicted blocks that a lease still holds free no memory yet, so one round may not be enough.
            if self._cached is None or not self._cached.evict(num_missing):
                return None
        return self._allocator.allocate(num_blocks)

    def _allocate_with_head(self, num_blocks: int, found: Match, num_head: int) -> BlockIds | None:
        """Allocate, and copy the matched head of the last matched block into the first fresh one."""
        if not num_head:
            return self._allocate(num_blocks)
        source = found.block_ids[-1:]
        self._allocator.acquire(source)  # making room may evict it, but must not reuse it yet
        fresh = None
        try:
            fresh = self._allocate(num_blocks)
            if fresh is not None:
                self._copy_head(int(source[0]), int(fresh[0]), num_head)
                if self._cached is not None:
                    self._cached.use_head(int(source[0]))
        except BaseException:
            if fresh is not None:
                self._allocator.free(fresh)
            raise
        finally:
            self._allocator.free(source)
        return fresh

    def _copy_head(self, source: int, target: int, num_tokens: int) -> None:
        self.buffer.copy_block_head(source, target, num_tokens)
        self._num_copied_heads += 1

    def _explain(self, lease: Lease, found: Match, num_lost: int) -> Miss:
        """Return why a lease has no more cached tokens than `found`; `num_lost` of these found no room."""
        if self._cached is None:
            return DISABLED_MISS
        miss = self._cached.explain(lease, found, num_lost)
        if miss.reason is MissReason.LAST_TOKEN:
            return miss
        num_full = found.num_full_blocks(self.block_size)
        left = None if self._loads is None else self._loads.passed_over(lease, num_full)
        if left is not None:
            return replace(left, parting=miss.parting)
        return self._elsewhere.explain(self._cached.index, lease, found, miss)

    def _free(self, lease: Lease) -> None:
        """Unpin and free the blocks of a lease that is no longer registered."""
        if self._cached is not None:
            self._cached.index.unpin(lease.block_table[: lease.num_committed])
        self._allocator.free(lease.block_table)
        self._tails.pop(lease, None)
        lease.num_blocks = lease.num_committed = 0
        if self._cached is not None:
            self._cached.keep_quotas()

    def _free_loaded(self) -> None:
        """Free the blocks of freed leases whose load has ended."""
        for lease in [one for one in self._draining if one.pending and one.pending.num_loaded.done()]:
            self._draining.remove(lease)
            self._free(lease)
