"""The tiers below the device on all ranks, as one: a prefix counts only as far as every rank has it.

Each rank has host and disk tiers of its own, which hold its part of a block under the same key; in a pool the
part has a name of its own (`pool/keys.py`). Tiers are told
of the same commits, hits and evictions in the same order, but evict, fail and lose blocks by themselves. So
what they hold is asked of all, and the shortest answer counts. What one rank lacks and another has is counted
by rank; it is computed, and then written again by the ranks that lack it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from typing_extensions import override

from stemma.engine.ranks.leader import Ranks
from stemma.engine.ranks.messages import StopPrefetch, Tell
from stemma.errors import EngineFailed
from stemma.memory.kv_events import KVEventSink
from stemma.memory.tiers.block_store import BlockStore
from stemma.memory.tiers.device_block import BlockNotes, DeviceBlock
from stemma.memory.tiers.loads import Prefetch
from stemma.memory.tiers.lower import LowerTiers, PassedOver
from stemma.memory.tiers.pool_asks import PoolAsk
from stemma.memory.tiers.tier_stats import TransferStats
from stemma.memory.tiers.transfer import TierTransfer
from stemma.types import BlockKey, Tier

_SLOW_TIMEOUT_S = 120.0
"""For what an operator asks of all ranks."""


class RankedTiers(LowerTiers):
    """Rank 0's own tiers and those of the other ranks."""

    def __init__(self, own: TierTransfer, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self._missing: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """Those of rank 0."""
        return self._own.stores

    @property
    @override
    def must_probe(self) -> bool:
        return self._own.must_probe

    def watch(self, sink: KVEventSink) -> None:
        """Tell nothing: what rank 0's tiers hold isn't what the engine can load."""

    def match(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        """Return the tiers, on rank 0, of the leading keys that all ranks have and that are worth loading."""
        return self._common(keys, self._own.match)

    @override
    def held(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        return self._common(keys, self._own.held)

    @override
    def gain_s(self, tiers: Sequence[Tier], num_tokens: int) -> float:
        return self._own.gain_s(tiers, num_tokens)

    @override
    def choose(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        return self._own.choose(keys)

    def _common(
        self, keys: Sequence[BlockKey], find: Callable[[Sequence[BlockKey]], Sequence[Tier]]
    ) -> Sequence[Tier]:
        """Return what rank 0's tiers find, as far as all ranks have it."""
        if not keys or not self._own.stores:
            return ()
        asked = self._ranks.ask("num_held", list(keys))
        own = find(keys)
        counts = [self._own.num_held(keys), *(self._ranks.result(one) for one in asked)]
        self._note(counts)
        return own[: min(counts)]

    def passed_over(self, keys: Sequence[BlockKey]) -> PassedOver | None:
        """Return what the tiers of all ranks have of `keys` beyond `match`; None if not even the first."""
        left = self._own.passed_over(keys)
        if left is None:
            return None
        held = min(self._ranks.result(one) for one in self._ranks.ask("num_held", list(keys)))
        return replace(left, num_blocks=min(left.num_blocks, held)) if held else None

    @override
    def notes(self, keys: Sequence[BlockKey]) -> Sequence[BlockNotes]:
        return self._own.notes(keys)

    def load(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], num_spared: int | None = None
    ) -> Future[int]:
        """Load on all ranks; the result, once all of them are done, is what arrived on every rank."""
        parts = self._ranks.load(list(keys), list(block_ids))
        return _together([self._own.load(keys, block_ids, num_spared), *parts], self._note)

    def prefetch(
        self, parent: BlockKey, keys: Sequence[BlockKey], owners: Sequence[str] = ()
    ) -> Prefetch | None:
        """Let each rank promote its own blocks, and ask the pool for its parts: all of them or none.

        Rank 0 decides how, by what asking takes the slowest. If it waits, the probe is done when all ranks'
        are: then `match` has complete information.
        """
        ask = self._own.ask_for(keys)
        started = self._own.prefetch(parent, keys, owners, ask=ask)
        if started is None:
            return None
        number, probes = self._ranks.prefetch(parent, list(keys), list(owners), ask)
        _when_all(probes, lambda: self._note_asks(probes))
        probe = _all_over([started.probe, *probes]) if ask is PoolAsk.AWAITED else started.probe

        def stop() -> None:
            started.stop()
            self._tell_if_alive(StopPrefetch(number))

        return Prefetch(probe, stop)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Report what computing costs to rank 0, which decides what is worth loading."""
        self._own.observe_prefill(num_tokens, seconds)

    @override
    def on_commit(self, blocks: Sequence[DeviceBlock]) -> None:
        self._moved("on_commit", blocks)

    @override
    def on_hit(self, blocks: Sequence[DeviceBlock]) -> None:
        self._moved("on_hit", blocks)

    @override
    def on_renew(self, blocks: Sequence[DeviceBlock]) -> None:
        self._moved("on_renew", blocks)

    @override
    def on_evict(self, blocks: Sequence[DeviceBlock]) -> None:
        self._moved("on_evict", blocks)

    @override
    def on_drop(self, blocks: Sequence[DeviceBlock]) -> None:
        self._moved("on_drop", blocks)

    @override
    def copy_waiting(self) -> bool:
        if self._own.stores:
            self._ranks.tell(Tell("copy_waiting", ()))
        return self._own.copy_waiting()

    def set_quotas(self, quotas: Mapping[Tier, Mapping[str, int]]) -> None:
        """Set how many blocks each owner may hold in each tier of each rank."""
        self._ranks.tell(Tell("set_quotas", (quotas,)))
        self._own.set_quotas(quotas)

    def lookup(self, keys: Sequence[BlockKey]) -> dict[Tier, list[bool]]:
        """Return, per tier, which keys it holds on every rank."""
        asked = self._ranks.ask("lookup", list(keys))
        found = [self._own.lookup(keys), *(self._result(one) for one in asked)]
        return {tier: [all(one[tier][n] for one in found) for n in range(len(keys))] for tier in found[0]}

    def pin(self, keys: Sequence[BlockKey]) -> dict[Tier, list[BlockKey]]:
        """Forbid eviction of the blocks that every rank's tier holds; return which those are, by tier."""
        asked = self._ranks.ask("pin", list(keys))
        pinned = [self._own.pin(keys), *(self._result(one) for one in asked)]
        common = {
            tier: [key for key in held if all(key in one[tier] for one in pinned[1:])]
            for tier, held in pinned[0].items()
        }
        surplus = [
            {tier: [key for key in held if key not in common[tier]] for tier, held in one.items()}
            for one in pinned
        ]
        self._ranks.tell_each([Tell("unpin", (one,)) for one in surplus[1:]])
        self._own.unpin(surplus[0])
        return common

    @override
    def unpin(self, pinned: Mapping[Tier, Sequence[BlockKey]]) -> None:
        self._ranks.tell(Tell("unpin", (dict(pinned),)))
        self._own.unpin(pinned)

    def read(self, key: BlockKey, into: memoryview) -> bool:
        """Return False: a block lies in parts, of which this would read one."""
        return False

    def flush(self) -> dict[Tier, int]:
        """Drop every unpinned block on all ranks; return how many rank 0 dropped."""
        asked = self._ranks.ask("flush")
        dropped = self._own.flush()
        for one in asked:
            self._result(one)
        return dropped

    @override
    def drain(self, timeout_s: float) -> bool:
        asked = self._ranks.ask("drain", timeout_s)
        return self._own.drain(timeout_s) & all([self._result(one) for one in asked])

    def stats(self) -> TransferStats:
        """Return those of rank 0, and the blocks that each rank lacked."""
        with self._lock:
            missing = {rank: self._missing[rank] for rank in range(self._ranks.share.num_processes)}
        return replace(self._own.stats(), missing_by_rank=missing)

    @override
    def check(self) -> None:
        asked = self._ranks.ask("check")
        self._own.check()
        for one in asked:
            self._result(one)

    def close(self) -> None:
        """Close rank 0's tiers; the others close theirs with `Ranks.close`."""
        self._own.close()

    def _moved(self, method: str, blocks: Sequence[DeviceBlock]) -> None:
        if self._own.stores and len(blocks):
            self._ranks.tell(Tell(method, (list(blocks),)))
            getattr(self._own, method)(blocks)

    def _note(self, counts: Sequence[int]) -> None:
        """Count what each rank lacks of what the best one has."""
        longest = max(counts)
        with self._lock:
            for rank, held in enumerate(counts):
                if held < longest:
                    self._missing[rank] += longest - held

    def _note_asks(self, probes: Sequence[Future[float]]) -> None:
        taken = [probe.result() for probe in probes if probe.exception() is None]
        self._own.asks.others_s = max(taken, default=0.0)

    def _result(self, future: Future[Any]) -> Any:
        return self._ranks.result(future, _SLOW_TIMEOUT_S)

    def _tell_if_alive(self, message: object) -> None:
        with suppress(EngineFailed):  # the engine ends anyway
            self._ranks.tell(message)


def _all_over(parts: Sequence[Future[Any]]) -> Future[None]:
    """Return a future that is done once all are, whether they failed or not."""
    over: Future[None] = Future()
    _when_all(parts, lambda: over.set_result(None))
    return over


def _together(parts: Sequence[Future[int]], note: Callable[[Sequence[int]], None]) -> Future[int]:
    """Return the least result of all, once all are done, or the first rank's error."""
    least: Future[int] = Future()
    least.set_running_or_notify_cancel()  # the other ranks write into these blocks: it can't be cancelled

    def settle() -> None:
        error = next((e for e in (part.exception() for part in parts) if e is not None), None)
        if error is not None:
            least.set_exception(error)
            return
        counts = [part.result() for part in parts]
        note(counts)
        least.set_result(min(counts))

    _when_all(parts, settle)
    return least


def _when_all(parts: Sequence[Future[Any]], then: Callable[[], None]) -> None:
    """Call `then` on the thread that ends the last of `parts`."""
    lock = threading.Lock()
    num_left = len(parts)

    def on_done(_part: Future[Any]) -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
            is_last = num_left == 0
        if is_last:
            then()

    for part in parts:
        part.add_done_callback(on_done)
