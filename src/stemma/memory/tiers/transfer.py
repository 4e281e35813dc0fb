"""One API over the tiers below the device: what is copied down, and what is loaded.

Down: the step loop calls `on_commit`, `on_hit`, `on_renew` and `on_evict`. A policy per tier says which of
them copies a block down. The step loop pays at most one memcpy per block: into the host arena, or into
staging, from which a thread writes it (`write_queue.py`). Up: `match` says what is worth loading
(`estimate.py`), and `load` loads it in the background (`loads.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal

from typing_extensions import override

from stemma.config.settings import WritePolicy
from stemma.errors import ConfigError, StorageError
from stemma.memory.device.block_codec import BlockCodec
from stemma.memory.device.copy import BlockCopy
from stemma.memory.kv_events import KVEventSink
from stemma.memory.tiers.block_store import BlockPut, BlockStore, ReadResult
from stemma.memory.tiers.copies_down import CopiesDown
from stemma.memory.tiers.device_block import NO_NOTES, BlockNotes, DeviceBlock
from stemma.memory.tiers.estimate import LoadEstimator
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.loads import LoadQueue, Prefetch
from stemma.memory.tiers.lower import LowerTiers, PassedOver
from stemma.memory.tiers.pool_asks import PoolAsk, PoolAsks
from stemma.memory.tiers.recent_keys import NOTE_BYTES, RecentKeys, Whereabouts
from stemma.memory.tiers.tier_stats import TierStats, TransferStats
from stemma.memory.tiers.write_queue import BATCH_BLOCKS, WriteQueue
from stemma.supervision import LoggingSupervisor, Supervisor, start_thread
from stemma.types import BlockKey, Tier

PrefetchPolicy = Literal["best_effort", "timeout", "wait_complete"]

MAX_KEYS_REMEMBERED = 1 << 17
"""Entries of each table of notes about keys, those of evicted blocks included."""
_MAX_WAITING_LOADS = 64
_MAX_LOW_WATER = 64
_SWEEP_EVERY_S = 60.0
_FLUSH_TIMEOUT_S = 30.0
_POLL_S = 0.01
_SLOW_TIER_BYTES_PER_S = 100e6
"""A slower tier isn't waited for beyond `load_timeout_s` as long as nobody knows what computing takes."""


@dataclass(frozen=True, slots=True)
class TransferPolicy:
    """When blocks move."""

    writes: Mapping[Tier, WritePolicy]
    """By lower tier: copy a block down on eviction from the tier above, on commit, or on its n-th use."""
    selective_uses: int = 2
    """The n of `write_through_selective`; computing the block counts as the first use."""
    exclusive: bool = False
    """Whether a block promoted from the host tier is removed there; else the copy stays."""
    prefetch: PrefetchPolicy = "timeout"
    """Whether a request waits for slow tiers: not at all, up to `load_timeout_s`, or without limit."""
    ask_always: bool = False
    """Whether each prompt waits until the pool was asked, however long that takes."""
    load_always: bool = False
    """Whether to load even what would be computed faster."""
    load_timeout_s: float = 2.0
    publish_tails: bool = False
    """Whether partial last blocks are written to the pool too, for decode servers of the same prompt."""
    fail_on_load_failure: bool = False
    """Whether a failed load fails its request; else the tokens are computed."""


class TierTransfer(LowerTiers):
    """The one API of the tiers below the device, over block stores.

    The step loop owns it; its methods return at once. `stats`, `lookup`, `pin`, `unpin`, `read` and `flush`
    are for any thread.
    """

    def __init__(
        self,
        device: BlockCopy,
        host: HostStore | None,
        stores: Sequence[BlockStore],
        policy: TransferPolicy,
        clock: Callable[[], float],
        *,
        block_size: int,
        num_staging_slots: int,
        blocks_may_wait: bool = True,
        supervisor: Supervisor | None = None,
    ) -> None:
        """`stores`: the slow ones, at most one per tier; all are closed with this object. `clock` never
        decreases. `blocks_may_wait`: blocks stay readable until `on_evict` or `on_drop`.

        Errors in the threads started here go to `supervisor`; None: they are logged.
        """
        self._supervisor = supervisor or LoggingSupervisor()
        self.estimator = LoadEstimator(block_size, clock)
        self._device = device
        self._policy = policy
        self._clock = clock
        self._block_size = block_size
        self._stores: tuple[BlockStore, ...] = () if host is None else (host,)
        self._host = host
        self._copies = CopiesDown(device, num_staging_slots, self._staged, may_wait=blocks_may_wait)
        self._queues: dict[Tier, WriteQueue] = {}
        self._writes: dict[Tier, WritePolicy] = {Tier.HOST: policy.writes.get(Tier.HOST, "write_through")}
        self._quotas: Mapping[Tier, Mapping[str, int]] = {}
        self._num_uses = RecentKeys[int](MAX_KEYS_REMEMBERED)
        self._whereabouts = Whereabouts(MAX_KEYS_REMEMBERED)
        self._swept_at = clock()
        self.asks = PoolAsks(self.estimator, clock)
        self._loads = LoadQueue(
            host,
            lambda: self._stores,
            device,
            self.estimator,
            clock,
            whereabouts=self._whereabouts,
            asks=self.asks,
            exclusive=policy.exclusive,
            fails=policy.fail_on_load_failure,
            supervisor=self._supervisor,
        )
        for store in stores:
            self.attach(store)
        if host is not None and host.packs:
            start_thread("stemma-pack", partial(_pack_until_closed, host), self._supervisor)

    # -- which tiers there are ------------------------------------------------------------------------

    @property
    def reserved_bytes(self) -> int:
        """Upper limit of this process's memory that the tiers take; tables are estimated."""
        if not self._stores:
            return 0
        total = sum(store.reserved_bytes for store in self._stores)
        total += remembered_bytes({store.tier for store in self._stores})
        if self.codec is not None:
            total += self.codec.reserved_bytes
        if self._queues:
            total += self._copies.arena.reserved_bytes
        return total + (self._loads.reserved_bytes if self._queues or self.codec is not None else 0)

    @property
    @override
    def stores(self) -> tuple[BlockStore, ...]:
        return self._stores

    @override
    def watch(self, sink: KVEventSink) -> None:
        for store in self._stores:
            store.watch(sink)

    @property
    def pins_memory(self) -> bool:
        """Whether memory that blocks are loaded from should be pinned."""
        return self._device.pins_memory

    @property
    def codec(self) -> BlockCodec | None:
        """What packs blocks for stores."""
        return self._device.codec

    def introduce(self, store: BlockStore) -> None:
        """Register our memory with a store that is about to be attached. May be slow; for any thread."""
        store.register(self._copies.arena.memory)
        if self._host is not None and not self._host.packs:
            store.register(self._host.memory)

    def attach(self, store: BlockStore, write: WritePolicy | None = None) -> None:
        """Use a slow store from now on. Raises ConfigError if the tier has one.

        `write` None: the policy's choice for its tier, else write-through.
        """
        if any(other.tier is store.tier for other in self._stores):
            raise ConfigError(f"there is a {store.tier} tier already; detach it first")
        self._queues[store.tier] = WriteQueue(
            store,
            self._copies.arena,
            supervisor=self._supervisor,
            idle_work=lambda: self._idle_work(store),
            on_failed=self._whereabouts.note_not_in_pool if store.tier is Tier.POOL else None,
        )
        store.set_quotas(self._quotas.get(store.tier, {}))
        self._writes[store.tier] = write or self._policy.writes.get(store.tier, "write_through")
        order = list(Tier)
        self._stores = tuple(sorted((*self._stores, store), key=lambda one: order.index(one.tier)))

    def detach(self, tier: Tier) -> Callable[[], None] | None:
        """Stop using a slow tier; None if there is none.

        Call the returned function from another thread: it waits for queued writes, up to a time limit, and
        closes the store.
        """
        store = next((one for one in self._stores if one.tier is tier), None)
        if store is None:
            return None
        self._stores = tuple(one for one in self._stores if one is not store)
        self._whereabouts.clear()
        return partial(_finish, self._queues.pop(tier), store)

    # -- up ---------------------------------------------------------------------------------------------

    @override
    def match(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        found = self.held(keys)
        if not self._policy.load_always:
            found = found[: self.estimator.num_worth_loading(found, self._loads.num_queued_blocks)]
        return self._chosen(keys, found)

    @override
    def held(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        found = self._locate(keys)
        if self._policy.prefetch == "best_effort":
            found = found[: next((n for n, tier in enumerate(found) if tier is not Tier.HOST), len(found))]
        return found

    @override
    def gain_s(self, tiers: Sequence[Tier], num_tokens: int) -> float:
        if self._policy.load_always:
            return float(num_tokens)
        return self.estimator.gain_s(tiers, num_tokens, self._loads.num_queued_blocks)

    @override
    def choose(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        return self._chosen(keys, self.held(keys))

    def _chosen(self, keys: Sequence[BlockKey], found: Sequence[Tier]) -> Sequence[Tier]:
        in_host = [key for key, tier in zip(keys, found, strict=False) if tier is Tier.HOST]
        if self._host is not None and in_host:
            self._host.touch(in_host)
        return [self._whereabouts.origin(key, tier) for key, tier in zip(keys, found, strict=False)]

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading keys `match` finds, worth loading or not."""
        return len(self.held(keys))

    @override
    def passed_over(self, keys: Sequence[BlockKey]) -> PassedOver | None:
        found = self._locate(keys)
        if not found:
            return None
        is_awaited = found[0] is Tier.HOST or self._policy.prefetch != "best_effort"
        return PassedOver(len(found), found[0], is_awaited)

    @override
    def notes(self, keys: Sequence[BlockKey]) -> Sequence[BlockNotes]:
        by_store = [store.notes_many(keys) for store in self._stores]
        return [
            next((one for one in each if one != NO_NOTES), NO_NOTES) for each in zip(*by_store, strict=True)
        ]

    @override
    def load(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], num_spared: int | None = None
    ) -> Future[int]:
        limit_s = self._load_limit_s(len(keys) if num_spared is None else num_spared)
        return self._loads.load(keys, block_ids, limit_s)

    @override
    def load_ahead(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int]
    ) -> tuple[Future[int], Callable[[], None]]:
        task = self._loads.load_ahead(keys, block_ids, self._load_limit_s(len(keys)))
        return task.future, task.stop

    def _load_limit_s(self, num_blocks: int) -> float | None:
        """Return for how long a load may go on: as long as computing would take, if that is longer."""
        if self._policy.prefetch == "wait_complete":
            return None
        compute_s = self.estimator.compute_s
        if compute_s is None:  # nothing was computed yet
            compute_s = self._device.block_bytes / _SLOW_TIER_BYTES_PER_S
        return max(self._policy.load_timeout_s, num_blocks * compute_s)

    @property
    @override
    def must_probe(self) -> bool:
        return Tier.POOL in self._queues and self._policy.prefetch != "best_effort"

    @override
    def prefetch(
        self,
        parent: BlockKey,
        keys: Sequence[BlockKey],
        owners: Sequence[str] = (),
        *,
        ask: PoolAsk | None = None,
    ) -> Prefetch | None:
        """As everywhere. `ask`: how to ask the pool; None: as `ask_for` says."""
        has_pool = Tier.POOL in self._queues
        has_use = has_pool or (self._host is not None and bool(self._queues))
        if not keys or not has_use or self._loads.num_waiting > _MAX_WAITING_LOADS:
            return None
        ask = self.ask_for(keys) if ask is None else ask
        task = self._loads.prefetch(parent, keys, self._policy.load_timeout_s, ask=ask, owners=owners)
        return Prefetch(task.probe, task.stop)

    def ask_for(self, keys: Sequence[BlockKey]) -> PoolAsk:
        """Return how to ask the pool for a prompt."""
        if not self.must_probe:
            return PoolAsk.BESIDE
        return PoolAsk.AWAITED if self._policy.ask_always else self.asks.decide(len(keys))

    def _locate(self, keys: Sequence[BlockKey]) -> list[Tier]:
        found: list[Tier] = []
        for key in keys:
            tier = next((store.tier for store in self._stores if self._has(store, key)), None)
            if tier is None:
                break
            found.append(tier)
        return found

    def _has(self, store: BlockStore, key: BlockKey) -> bool:
        if store.tier is Tier.POOL:
            return self._whereabouts.is_in_pool(key)
        return store.exists_many([key])[0]

    # -- down -------------------------------------------------------------------------------------------

    @override
    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self.estimator.observe_prefill(num_tokens, seconds)

    @override
    def on_commit(self, blocks: Sequence[DeviceBlock]) -> None:
        if not self._stores:
            return
        self._copies.copy_waiting()
        full = self._full(blocks)
        self._mark_duplicates(full)
        self._num_uses.note({block.key: self._num_uses.get(block.key, 0) + 1 for block in full})
        self._write(full, self._tiers("write_through"))
        if self._policy.publish_tails:
            tails = [block for block in blocks if block.num_tokens < self._block_size]
            # The index may let go of them without a word.
            self._write(tails, {Tier.POOL} & self._queues.keys(), is_leaving=True)

    @override
    def on_hit(self, blocks: Sequence[DeviceBlock]) -> None:
        if not self._stores:
            return
        full = self._full(blocks)
        self._mark_duplicates(full)
        uses = {block.key: self._num_uses.get(block.key, 0) + 1 for block in full}
        self._num_uses.note(uses)
        hot = [block for block in full if uses[block.key] >= self._policy.selective_uses]
        self._write(full, self._tiers("write_through"))
        self._write(hot, self._tiers("write_through_selective"))
        for queue in self._queues.values():
            if queue.store.is_local:
                queue.touch([block.key for block in full])

    @override
    def on_renew(self, blocks: Sequence[DeviceBlock]) -> None:
        full = self._full(blocks)
        self._copies.renew(full)
        hints = {block.key: block.hint for block in full}
        if self._host is not None:
            self._host.renew(hints)
        for queue in self._queues.values():
            if queue.store.is_local:
                queue.renew(hints)

    @override
    def on_evict(self, blocks: Sequence[DeviceBlock]) -> None:
        # Leaves come first here. Writing parents first makes the next tier evict a chain from its end too.
        full = self._full(blocks)[::-1]
        self._copies.leave(full)
        tiers = self._tiers("write_back")
        if self._host is None:
            self._write(full, tiers, is_leaving=True)
            return
        self._host.unmark_duplicates([block.key for block in full])
        self._write(full, tiers & {Tier.HOST}, is_leaving=True)
        if self._host.num_free < self._low_water:
            for tier in tiers - {Tier.HOST}:
                self._queues[tier].wake()

    @override
    def on_drop(self, blocks: Sequence[DeviceBlock]) -> None:
        self._copies.forget(blocks)
        if self._host is not None:
            self._host.unmark_duplicates([block.key for block in blocks])

    def _mark_duplicates(self, blocks: Sequence[DeviceBlock]) -> None:
        """Let a host tier that gets blocks as the device evicts them make room with what the device holds.

        Another tier would not get them again; and a disk, where a write costs more than its room, keeps them.
        """
        if self._host is not None and self._writes[Tier.HOST] == "write_back":
            # The head of a chain stays on the device the longest, so it is the first to go here.
            self._host.mark_duplicates(block.key for block in reversed(blocks))

    def _full(self, blocks: Sequence[DeviceBlock]) -> list[DeviceBlock]:
        """Leave out partial blocks: lower tiers are asked only for full ones."""
        return [block for block in blocks if block.num_tokens == self._block_size]

    def _tiers(self, policy: WritePolicy) -> set[Tier]:
        return {store.tier for store in self._stores if self._writes[store.tier] == policy}

    @override
    def copy_waiting(self) -> bool:
        return self._copies.copy_waiting()

    def _write(self, blocks: Sequence[DeviceBlock], tiers: set[Tier], *, is_leaving: bool = False) -> None:
        if self._host is not None and Tier.HOST in tiers and blocks:
            self._host.put_from(
                blocks, lambda at, into: self._device.out([blocks[n].block_id for n in at], into)
            )
        queues = [queue for tier, queue in self._queues.items() if tier in tiers]
        by_queues: dict[tuple[Tier, ...], list[DeviceBlock]] = {}
        for block in blocks:
            wanting = tuple(queue.store.tier for queue in queues if self._wants(queue, block.key))
            if wanting:
                by_queues.setdefault(wanting, []).append(block)
        for wanting, wanted in by_queues.items():
            copy = self._copies.copy_leaving if is_leaving else self._copies.copy
            copy(wanted, [self._queues[tier] for tier in wanting])

    def _wants(self, queue: WriteQueue, key: BlockKey) -> bool:
        return not (queue.has(key) or self._copies.is_waiting(key, queue) or self._has(queue.store, key))

    def _staged(self, queue: WriteQueue, blocks: Sequence[DeviceBlock]) -> None:
        if queue.store.tier is Tier.POOL:
            self._whereabouts.note_in_pool([block.key for block in blocks])

    # -- on the writer threads --------------------------------------------------------------------------

    @property
    def _low_water(self) -> int:
        """Number of free host slots below which blocks are demoted ahead of need."""
        assert self._host is not None
        return max(1, min(_MAX_LOW_WATER, self._host.capacity_blocks // 8))

    def _idle_work(self, store: BlockStore) -> bool:
        """Drop expired blocks; make room in the host tier. Returns whether there is more to do."""
        now = self._clock()
        if now - self._swept_at > _SWEEP_EVERY_S:
            self._swept_at = now
            for one in self._stores:
                one.expire()
                one.sync()
        host = self._host
        if host is None or self._writes.get(store.tier) != "write_back":
            return False
        if host.num_free >= self._low_water:
            return False
        return host.drop_oldest(BATCH_BLOCKS, lambda blocks: self._save(store, blocks)) > 0

    def _save(self, store: BlockStore, blocks: Sequence[BlockPut]) -> None:
        store.put_many(blocks[::-1])

    # -- for the operator -------------------------------------------------------------------------------

    @override
    def set_quotas(self, quotas: Mapping[Tier, Mapping[str, int]]) -> None:
        self._quotas = quotas
        for store in self._stores:
            store.set_quotas(quotas.get(store.tier, {}))

    @override
    def lookup(self, keys: Sequence[BlockKey]) -> dict[Tier, list[bool]]:
        return {store.tier: store.exists_many(keys) for store in self._stores}

    @override
    def pin(self, keys: Sequence[BlockKey]) -> dict[Tier, list[BlockKey]]:
        pinned: dict[Tier, list[BlockKey]] = {}
        for store in self._stores:
            held = store.pin(keys)
            pinned[store.tier] = [key for key, is_held in zip(keys, held, strict=True) if is_held]
        return pinned

    @override
    def unpin(self, pinned: Mapping[Tier, Sequence[BlockKey]]) -> None:
        for store in self._stores:
            store.unpin(pinned.get(store.tier, ()))

    @override
    def read(self, key: BlockKey, into: memoryview) -> bool:
        for store in self._stores:
            try:
                if store.get_many([key], [into])[0] is ReadResult.HIT:
                    return True
            except StorageError:  # closed by another thread
                continue
        return False

    @override
    def flush(self) -> dict[Tier, int]:
        self.drain(_FLUSH_TIMEOUT_S)
        self._num_uses.clear()
        self._whereabouts.clear()
        return {s.tier: s.clear() for s in self._stores if s.is_local}

    @override
    def drain(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while self._copies.num_waiting and time.monotonic() < end:
            time.sleep(_POLL_S)  # the step loop copies them
        left_s = max(0.0, end - time.monotonic())
        return not self._copies.num_waiting and all(
            queue.drain(left_s) for queue in list(self._queues.values())
        )

    def wait_for_queued(self, tier: Tier, timeout_s: float) -> bool:
        """Wait until all writes queued for a tier so far have ended; return whether they have."""
        queue = self._queues.get(tier)
        return queue is None or queue.wait_for_queued(timeout_s)

    @override
    def stats(self) -> TransferStats:
        tiers = {}
        for store in self._stores:
            queue = self._queues.get(store.tier)
            tiers[store.tier] = TierStats(
                counters=store.counters.snapshot(),
                num_blocks=store.num_blocks,
                capacity_blocks=store.capacity_blocks,
                stored_bytes=store.stored_bytes,
                block_bytes=store.block_bytes,
                load_s_per_block=self.estimator.load_s(store.tier),
                is_worth_loading=self.estimator.is_worth_loading(store.tier),
                num_queued_writes=queue.num_queued if queue else 0,
            )
        return TransferStats(
            tiers,
            self._loads.snapshot(),
            self._copies.dropped,
            self._copies.num_waiting,
            self._loads.num_queued_blocks,
            self.estimator.compute_s,
        )

    @override
    def check(self) -> None:
        for store in self._stores:
            store.check()

    @override
    def close(self) -> None:
        self._loads.close()
        self._copies.finish(_FLUSH_TIMEOUT_S)
        for tier in list(self._queues):
            self._queues.pop(tier).close()
        for store in self._stores:
            store.close()
        self._stores = ()
        self._host = None


def remembered_bytes(tiers: Set[Tier]) -> int:
    """Return the approximate maximum bytes of notes about keys with these tiers."""
    num_tables = 1 + (Tier.POOL in tiers) + (Tier.HOST in tiers and len(tiers) > 1)
    return num_tables * NOTE_BYTES * MAX_KEYS_REMEMBERED if tiers else 0


def _pack_until_closed(host: HostStore) -> None:
    while host.pack_next(timeout_s=1.0):
        pass


def _finish(queue: WriteQueue, store: BlockStore) -> None:
    queue.close()
    store.close()
