"""`PrefixCache`: the one façade that the engine sees. match -> reserve -> commit -> free.

It joins the prefix index (which tokens are computed), the block allocator (who holds which block), the
device buffer (where the bytes are) and, where there are any, the tiers below. References: the index holds
one on each of its blocks, each lease one on every block of its table. A block is free when nobody holds it.

This file decides what a request gets. `leased_blocks.py` knows which blocks the leases hold, and frees them;
`cached_blocks.py` what enters and leaves the index; `prompt_loads.py` what a prompt gets from the tiers below
the device, and `tiers_below.py` is what an operator asks of these. `rests.py` lets requests go on from leases
of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from stemma.memory.cache.cached_blocks import CachedBlocks
from stemma.memory.cache.elsewhere import Elsewhere, OtherModels
from stemma.memory.cache.lease import Lease
from stemma.memory.cache.leased_blocks import BlockBuffer, LeasedBlocks
from stemma.memory.cache.loaded_ahead import LoadedAhead
from stemma.memory.cache.prompt_loads import PromptLoads
from stemma.memory.cache.rests import Rests
from stemma.memory.cache.state_hits import StateHit, StateHits
from stemma.memory.cache.states import CachedStates
from stemma.memory.cache.tiers_below import TiersBelow
from stemma.memory.device.allocator import BlockAllocator
from stemma.memory.kv_events import KVEventSink
from stemma.memory.tiers.loads import Prefetch
from stemma.memory.tiers.lower import LowerTiers
from stemma.prefix.eviction.policy import Conclusion
from stemma.prefix.explain import (
    DISABLED_MISS,
    RECOMPUTED_MISS,
    Miss,
    MissReason,
    load_failed,
    load_passed_over,
    no_state,
)
from stemma.prefix.image_ids import before_images, told_apart
from stemma.prefix.index import Match, PrefixIndex
from stemma.prefix.keys import KeySpace, Namespace
from stemma.types import NO_RETENTION, BlockIds, BlockKey, Retention, Tier, TokenArray

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)
_NO_MATCH = Match(0, _NO_BLOCKS)


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
    num_checkpoints: int = 0
    """Recurrent states and windows of KV that are kept on the device."""
    num_evicted_checkpoints: int = 0
    num_blocks_ahead: int = 0
    """Blocks loaded before anybody asked for them."""
    num_used_ahead: int = 0
    """Of these, blocks that a request used on the device."""
    num_wasted_ahead: int = 0
    """Of these, blocks that left the device unused."""


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
        states: CachedStates | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index` None disables reuse: blocks are then only allocated and shared between forks.

        `other_models` knows the prompts that other models left on the disk, for explanations.

        `states`: those of recurrent layers; None: the model has none.

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
        self._allocator = BlockAllocator(buffer.num_blocks) if states is None else states.places.slabs
        self._elsewhere = Elsewhere(self.block_size, other_models)
        self._cached = None
        if index is not None:
            self._cached = CachedBlocks(
                index,
                self._allocator,
                lower,
                self._elsewhere,
                policy_name=policy_name,
                block_costs=block_costs,
                clock=clock,
                on_left=None if states is None else states.drop_behind,
            )
        self._leased = LeasedBlocks(self.block_size, buffer, self._allocator, self._cached, states)
        self._rests = Rests(self._leased)
        self._states = states
        self._longest = self.num_blocks - (0 if states is None else states.places.num_reserved)
        """Blocks that one sequence can have."""
        if states is not None and self._cached is not None:
            states.share_with(self._cached)
        self._state_hits: StateHits | None = None
        if states is not None:
            self._state_hits = StateHits(states, self._cached, lower, self.block_size)
        self._held: set[Lease] = set()
        """The leases of `hold`."""
        self._num_touched = 0
        """Leading blocks that were used or touched, as far as `touch_ahead` looked."""

    @property
    def version(self) -> int:
        """Changes whenever a match may have changed."""
        return self._cached.version if self._cached is not None else 0

    @property
    def is_plain(self) -> bool:
        """Whether a sequence holds nothing but blocks: no recurrent state, no pages of windows."""
        return self._states is None

    @property
    def enabled(self) -> bool:
        """Whether finished blocks are kept and reused."""
        return self._cached is not None

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of tokens that one sequence can hold."""
        return self._longest * self.block_size

    @property
    def num_available(self) -> int:
        """Number of blocks that are free or evictable. O(leases whose partial tail is cached)."""
        return self._leased.num_available

    def max_tokens(self, namespace: Namespace, tokens: TokenArray) -> int:
        """Return the maximum length of a sequence that begins with `tokens`, given what `hold` keeps.

        This assumes that no other request runs. Held blocks count only if the sequence shares them.
        """
        kept = {block_id for lease in self._held for block_id in lease.block_table.tolist()}
        num_blocks = self._longest - len(kept)
        if kept:
            found = self._match(namespace, tokens)
            shared = found.block_ids[: found.num_full_blocks(self.block_size)].tolist()
            num_blocks += len(kept.intersection(shared))
        return num_blocks * self.block_size

    def match(self, namespace: Namespace, tokens: TokenArray) -> int:
        """Return how many leading tokens of a prompt are on the device, never the last one. Read-only."""
        if self._rests and self._rests.has(namespace, tokens):
            return len(tokens) - 1
        found = self._match(namespace, tokens)
        return found.num_tokens if self._state_hits is None else self._state_hits.on_device(found)

    def reserve(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        num_new: int = 1,
        *,
        retention: Retention = NO_RETENTION,
        session: int = 0,
        max_cached: int | None = None,
        is_use: bool = True,
        is_ahead: bool = False,
    ) -> Lease | None:
        """Lease the longest cached prefix of `tokens`, and blocks for the rest and `num_new` more tokens.

        Full blocks that match are shared; a block that matches in part is copied (copy-on-write), so reuse
        is by the token. `lease.num_cached_tokens` tokens need no computing. If lower tiers hold more,
        `lease.pending` is set: compute nothing before `finish_load`. Returns None, holding nothing, if there
        is no room now. `max_cached`: take no more tokens than that, from the device alone, because the rest
        is to be computed whatever is cached. Without `is_use`, policies learn nothing of it: nobody has
        come back to these blocks. `session`: number of the conversation that the prompt continues, as its
        client says, for the device's policy; 0: it says nothing. `is_ahead`: nor has anybody asked for what
        is loaded.
        """
        self._leased.free_loaded()
        make = partial(
            Lease, namespace, self.key_space, tokens, retention, session=session, is_ahead=is_ahead
        )
        if self._rests and max_cached is None:
            lease = self._rests.go_on(namespace, tokens, num_new, make)
            if lease is not None:
                return lease
        found = self._match(namespace, tokens if max_cached is None else tokens[: max_cached + 1])
        lease = make()
        loads = self._loads if max_cached is None else None
        hit = None
        if self._state_hits is not None:
            tiers, keys = loads.match(lease, found, is_worth=False) if loads is not None else ((), [])
            hit = self._state_hits.find(lease, found, tiers, keys, may_load=loads is not None)
            found = hit.found
        num_full = found.num_full_blocks(self.block_size)
        self._leased.share(lease, found.block_ids[:num_full])
        try:
            is_reserved = self._fill(lease, found, num_new, loads=loads, hit=hit, is_use=is_use)
        except BaseException:
            self._leased.free_blocks(lease)
            raise
        if not is_reserved:
            self._leased.free_blocks(lease)
            return None
        if max_cached is not None and self._cached is not None:
            lease.miss = RECOMPUTED_MISS
        self._leased.add(lease)
        return lease

    def _fill(
        self,
        lease: Lease,
        found: Match,
        num_new: int,
        *,
        loads: PromptLoads | None,
        hit: StateHit | None,
        is_use: bool,
    ) -> bool:
        """Allocate the other blocks of a lease that shares what `found` has; False if there is no room."""
        if self._states is not None and not self._begin_state(lease, hit):
            return False
        num_full = found.num_full_blocks(self.block_size)
        if hit is not None:
            tiers, keys = hit.tiers, list(hit.keys)
        else:
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
        if self._cached is not None and is_use:
            self._cached.use(found.block_ids[:num_full])
        pieces = () if hit is None else hit.pieces
        if loads is not None and (tiers or pieces):
            state = [] if self._states is None or not pieces else self._states.blocks_of(lease)
            num_spared = None if hit is None else hit.num_spared // self.block_size
            loads.start(lease, num_full, tiers, [*keys, *pieces], state, num_spared)
        elif hit is not None and hit.passed_over is not None:
            lease.miss = load_passed_over(*hit.passed_over, hit.position, is_awaited=True)
        elif hit is not None and hit.num_with_kv > hit.position:
            lease.miss = no_state(hit.num_with_kv, hit.position)
        else:
            lease.miss = self._explain(lease, found, num_lost)
        return True

    def _begin_state(self, lease: Lease, hit: StateHit | None) -> bool:
        """Give a lease the state that it goes on from, or room to load it into; False: no state is free."""
        assert self._states is not None
        if hit is None:
            return self._states.begin(lease, 0)
        if hit.pieces:
            return self._states.begin_loading(lease, hit.position, hit.num_with_kv)
        return self._states.begin(lease, hit.position, hit.num_with_kv)

    def plan_state(self, lease: Lease, start: int, end: int, *, num_drafts: int = 0) -> bool:
        """Make room for the recurrent states of a step over tokens [start, end); False if there is none."""
        return self._states is None or self._states.plan(lease, start, end, num_drafts=num_drafts)

    def land_state(self, lease: Lease, end: int, num_computed: int) -> bool:
        """Take over the states that a step left, which ends at `end` and of whose tokens `num_computed` hold.

        Returns False if these must be computed again, because drafts were wrong.
        """
        return self._states is None or self._states.land(lease, end, num_computed=num_computed)

    def hold(self, namespace: Namespace, tokens: TokenArray) -> Lease:
        """Return a lease on the full blocks of a prompt that are on the device; it may be empty.

        It holds the deepest checkpoint behind them too, if there is one and room enough beside it. Nothing is
        allocated, copied or loaded. `free(lease, lease.num_tokens)` frees it.
        """
        found = _NO_MATCH
        if self._cached is not None and len(tokens):
            found = self._cached.index.match(namespace, tokens)
        num_full = found.num_full_blocks(self.block_size)
        held = tokens[: num_full * self.block_size]
        lease = Lease(namespace, self.key_space, held)
        self._leased.share(lease, found.block_ids[:num_full])
        self._leased.add(lease)
        self._held.add(lease)
        if self._states is not None:
            self._states.pin(lease, len(held))
        return lease

    @property
    def states(self) -> CachedStates | None:
        """Recurrent states and windows; None: the model has neither."""
        return self._states

    def checkpoint_keys(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return the keys under which lower tiers may have checkpoints of a prompt with these blocks."""
        return [] if self._states is None else self._states.likely_pieces(keys)

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
        found = self._match(namespace, tokens)
        if self._states is None:
            return self._loads.prefetch(namespace, tokens, found)
        return self._loads.prefetch(namespace, tokens, found, self._states.likely_pieces)

    def load_ahead(self, namespace: Namespace, tokens: TokenArray, max_blocks: int) -> Lease | None:
        """Begin to load up to `max_blocks` blocks of `tokens` that lower tiers have next after the device.

        Only free and evictable blocks are taken, and only where a request would load them too. Once
        `lease.has_loaded`, or earlier to end it, call `end_load_ahead`. None: nothing to load, or no room. A
        model with recurrent states or windows loads nothing ahead.
        """
        if self._loads is None or self._cached is None or self._states is not None or len(tokens) < 2:
            return None
        found = self._match(namespace, tokens)
        tiers, _ = self._loads.match(Lease(namespace, self.key_space, tokens), found)
        num_wanted = min(len(tiers), max_blocks)
        if num_wanted <= 0:
            return None
        # One token behind the last block, as a prompt has that is not computed to its end; it needs no room.
        end = (found.num_full_blocks(self.block_size) + num_wanted) * self.block_size + 1
        lease = self.reserve(namespace, tokens[:end], num_new=-1, is_use=False, is_ahead=True)
        if lease is not None and lease.pending is None:
            self.free(lease, lease.num_cached_tokens)
            return None
        return lease

    def end_load_ahead(self, lease: Lease) -> int:
        """End what `load_ahead` began: what arrived is cached. Return how many blocks that were."""
        pending = lease.pending
        assert self._cached is not None
        assert pending is not None
        if pending.stop is not None:
            pending.stop()
        num_loaded = 0
        if lease.has_loaded:
            self.finish_load(lease)
            arrived = lease.block_table[pending.first : lease.num_committed].copy()
            num_loaded = len(arrived)
            self._cached.ahead.add(arrived)
        self.free(lease, lease.num_cached_tokens)
        return num_loaded

    @property
    def num_waiting_ahead(self) -> int:
        """Device blocks that were loaded ahead and that nobody has used yet."""
        return self._cached.ahead.num_waiting if self._cached is not None else 0

    def copy_waiting(self) -> bool:
        """Copy down blocks that found no room on their way; return whether some wait still."""
        return self._lower is not None and self._lower.copy_waiting()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Report that a step took `seconds` for `num_tokens` prompt tokens."""
        if self._lower is not None:
            self._lower.observe_prefill(num_tokens, seconds)

    def finish_load(self, lease: Lease) -> None:
        """Commit the blocks that a finished load delivered. The rest must be computed.

        If KV arrived and not the state behind it, one within that KV is loaded next: `lease.pending` is set.
        """
        assert self._loads is not None
        assert lease.pending is not None
        num_asked, num_lost = lease.pending.first + len(lease.pending.tiers), lease.pending.num_lost
        num_held = self._loads.finish(lease)
        num_lost += num_asked - num_held
        if self._states is not None:
            if lease.has_loaded_state is False and self._load_earlier(lease, num_held, num_lost):
                return
            self._finish_state(lease, num_held)
        self.commit(lease, lease.num_cached_tokens)
        found = Match(lease.num_cached_tokens, lease.block_table[:num_held])
        if num_lost:
            lease.miss = load_failed(num_lost, lease.num_cached_tokens)
        elif lease.state is not None and lease.state.branch > lease.num_cached_tokens:
            lease.miss = no_state(lease.state.branch, lease.num_cached_tokens)
        else:
            lease.miss = self._explain(lease, found, 0)

    def _load_earlier(self, lease: Lease, num_held: int, num_lost: int) -> bool:
        """Load a state that stands within the blocks that arrived, once; False: none is worth it."""
        assert self._states is not None
        assert self._state_hits is not None
        if lease.load_error is not None or self._loads is None or lease.has_retried:
            return False
        hit = self._state_hits.earlier(lease, num_held * self.block_size)
        if hit is None or not self._states.begin_earlier(lease, hit.position):
            return False
        lease.has_retried = True
        state = self._states.blocks_of(lease)
        num_spared = hit.num_spared // self.block_size
        self._loads.start(lease, num_held, (), hit.pieces, state, num_spared, num_lost)
        return True

    def _finish_state(self, lease: Lease, num_held: int) -> None:
        """Have a lease whose load ended go on from a state that is there, whose tokens count as cached."""
        assert self._states is not None
        position = self._states.finish_loading(lease, lease.keys(num_held), num_held * self.block_size)
        counted = 0
        for tier, num_tokens in list(lease.cached_by_tier.items()):
            lease.cached_by_tier[tier] = min(num_tokens, position - counted)
            counted += lease.cached_by_tier[tier]
        lease.cached_by_tier = {tier: count for tier, count in lease.cached_by_tier.items() if count}

    def loads(self) -> list[Future[int]]:
        """Return the loads that still write into blocks, of waiting leases and of freed ones."""
        return self._leased.loads()

    @property
    def has_loads_of_freed(self) -> bool:
        """Whether blocks of freed leases are still written into."""
        return self._leased.has_loads_of_freed

    def commit(self, lease: Lease, num_computed: int, *, tail: bool = False) -> None:
        """Enter blocks whose KV is complete into the index; O(1) until another block is full.

        The KV of the leading `num_computed` tokens is complete. If the index already holds an identical
        block, the lease switches to it and its own is freed. With `tail`, the partial last block enters
        too; the lease may go on writing after those tokens.
        """
        if self._cached is not None and (tail or num_computed // self.block_size > lease.num_committed):
            self._leased.commit(lease, num_computed, tail=tail)
        if self._states is not None:
            self._states.tell()

    def fork(self, lease: Lease, num_computed: int) -> Lease | None:
        """Return a second lease on the same tokens: full blocks shared, the partial one copied.

        None if no block is free for the copy and the next token.
        """
        make = partial(Lease, lease.namespace, self.key_space, lease.tokens, lease.retention)
        num_blocks = -(-(lease.num_tokens + 1) // self.block_size)
        twin = self._leased.twin(lease, num_computed, num_blocks, make)
        if twin is None and self._rests:
            self.end_rests()
            twin = self._leased.twin(lease, num_computed, num_blocks, make)
        if twin is None:
            return None
        if self._states is not None:
            self._states.twin(lease, twin)
        twin.cached_by_tier = dict(lease.cached_by_tier)
        twin.miss = lease.miss
        return twin

    def free(self, lease: Lease, num_computed: int) -> None:
        """Free all blocks of the lease; what was computed, including the partial tail, stays cached.

        The blocks are freed even if the commit raises.
        """
        self._held.discard(lease)
        self._rests.drop(lease)
        self._leased.free(lease, num_computed)

    def rest(self, lease: Lease, num_computed: int) -> None:
        """As `free`, but until `end_rests` the blocks wait for requests that go on with one token more.

        Those are spared a lookup and an entry in the index; blocks that are needed elsewhere don't wait.
        """
        is_plain = self._cached is not None and self._states is None
        if not is_plain or self._leased.has_fence or lease.pending is not None or not num_computed:
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
        return self._leased.has_fence

    def open_fence(self) -> None:
        """Call when a step is launched: blocks that leases free from now on are kept until `close_fence`.

        Until then the step may still read and write them, and other work may run at the same time.
        """
        self._leased.open_fence()

    def close_fence(self) -> None:
        """Call when the oldest step under way has ended."""
        self._leased.close_fence()

    def close(self) -> None:
        """Close the lower tiers, once their queued writes are done. The cache isn't used afterwards."""
        if self._lower is not None:
            self._lower.close()

    def watch(self, sink: KVEventSink) -> None:
        """Tell `sink` from now on of blocks and checkpoints that enter and leave this process's tiers."""
        if self._cached is not None:
            self._cached.events = sink
        if self._states is not None:
            self._states.watch(sink)
        if self._lower is not None:
            self._lower.watch(sink)

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Set how many device blocks each owner (`Namespace.owner`) may hold; others hold any number.

        Its checkpoints count with the blocks whose memory they take. Whoever holds more loses at once what it
        used the longest ago, leaves first, except what requests hold; that goes when the requests end.
        """
        if self._cached is not None:
            self._cached.index.set_quotas(quotas)
            self._leased.keep_quotas()

    def evict_all(self) -> None:
        """Evict all that no lease holds: states and windows need room in one piece."""
        self.end_rests()
        self._leased.evict_all()

    def flush(self) -> int:
        """Drop every block that no lease holds; return how many."""
        self.end_rests()
        self._leased.free_loaded()
        if self._states is not None:
            self._states.flush(self._held)
        return self._cached.flush() if self._cached is not None else 0

    def continuation(self, namespace: Namespace, tokens: TokenArray, max_tokens: int) -> TokenArray:
        """Return up to `max_tokens` tokens that followed `tokens` in the cache; empty if none did. Read-only.

        Only the radix index can tell. Nobody says images: the tokens end before one.
        """
        if self._cached is None:
            return _NO_BLOCKS
        return before_images(self._cached.index.continuation(namespace, tokens, max_tokens))

    def conclude(self, namespace: Namespace, tokens: TokenArray, conclusion: Conclusion) -> None:
        """Tell the device's eviction policy how the request ended that left these tokens, if they are there.

        They are prompt and answer; the last one was never computed. This is no use of them: it only says who
        may come back for them, and when.
        """
        if self._cached is None:
            return
        found = self._match(namespace, tokens)
        self._cached.conclude(found, len(tokens) - 1, conclusion)
        if self._states is not None:
            num_full = found.num_full_blocks(self.block_size)
            keys = self._cached.keys(found.block_ids[:num_full])
            self._states.conclude(keys, num_full * self.block_size, conclusion)

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
        ahead = LoadedAhead() if self._cached is None else self._cached.ahead
        return CacheStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self._allocator.num_free,
            num_cached_blocks=self._cached.index.num_blocks if self._cached else 0,
            num_evictable_blocks=self._cached.index.num_evictable if self._cached else 0,
            num_evicted_blocks=self._cached.num_evicted if self._cached else 0,
            num_deduplicated_blocks=self._leased.num_deduplicated,
            num_copied_heads=self._leased.num_copied_heads,
            num_ghosts=self._cached.num_ghosts if self._cached else 0,
            num_policy_failures=self._cached.index.num_policy_failures if self._cached else 0,
            num_regretted_blocks=self._cached.num_regretted if self._cached else 0,
            num_checkpoints=0 if self._states is None else self._states.num_checkpoints,
            num_evicted_checkpoints=0 if self._states is None else self._states.num_evicted,
            num_blocks_ahead=ahead.num_loaded,
            num_used_ahead=ahead.num_used,
            num_wasted_ahead=ahead.num_wasted,
        )

    def check(self) -> None:
        """Verify that index, records, leases and allocator agree, and check the tiers below (slow)."""
        if self._lower is not None:
            self._lower.check()
        self._leased.check()
        if self._states is not None:
            self._states.check(self._leased.leases, None if self._cached is None else self._cached.all_keys())

    def _match(self, namespace: Namespace, tokens: TokenArray) -> Match:
        if self._cached is None or len(tokens) < 2:
            return _NO_MATCH
        found = self._cached.index.match(namespace, tokens[:-1])
        num_tokens = told_apart(tokens, found.num_tokens)
        if num_tokens == found.num_tokens:
            return found
        return replace(
            found, num_tokens=num_tokens, block_ids=found.block_ids[: -(-num_tokens // self.block_size)]
        )

    def _allocate(self, num_blocks: int) -> BlockIds | None:
        """Return fresh blocks, evicting as many as needed, those that rest too; None if that isn't enough."""
        fresh = self._leased.allocate(num_blocks)
        if fresh is None and self._rests:
            self.end_rests()
            fresh = self._leased.allocate(num_blocks)
        return fresh

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
                self._leased.copy_head(int(source[0]), int(fresh[0]), num_head)
                if self._cached is not None:
                    self._cached.use_head(int(source[0]))
        except BaseException:
            if fresh is not None:
                self._allocator.free(fresh)
            raise
        finally:
            self._allocator.free(source)
        return fresh

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
