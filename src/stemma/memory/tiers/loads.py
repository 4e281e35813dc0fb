"""Loads: worker threads read blocks from lower tiers and copy them into device blocks, within a time limit.

Only here does a read that misses, fails, is corrupt or comes late turn into a smaller number of loaded
blocks. It is counted by tier and reason, and the scheduler computes the tokens instead. An unexpected error
also ends the load, and is reported to the supervisor.

Blocks of a slow store are first read into a buffer of the worker, or into one that the store lends. So a read
that hangs never writes into device blocks that another request got since. A host block is copied directly
into its device block.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from queue import PriorityQueue

import torch

from stemma.errors import StorageError
from stemma.memory.device.copy import BlockCopy
from stemma.memory.tiers.block_store import BlockPut, BlockStore, ReadResult
from stemma.memory.tiers.chunks import Chunk, ChunkReader, num_buffers
from stemma.memory.tiers.device_block import NO_NOTES
from stemma.memory.tiers.estimate import LoadEstimator
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.pool_asks import PoolAsk, PoolAsks
from stemma.memory.tiers.recent_keys import Whereabouts
from stemma.memory.tiers.tier_stats import LoadCounters
from stemma.supervision import Supervisor, start_thread
from stemma.types import BlockKey, Tier

logger = logging.getLogger(__name__)
RUN_BLOCKS = 1024
"""Blocks looked up at once; between two such runs reading and copying don't overlap."""
NUM_LOAD_THREADS = 2
_LOAD, _PREFETCH, _AHEAD, _STOP = 0, 1, 2, 3


@dataclass(slots=True)
class Prefetch:
    """A lookup in the lower tiers for a request that waits in the queue."""

    probe: Future[None]
    """Done when `TierTransfer.match` has complete information on the prompt; admission may wait for it."""
    stop: Callable[[], None]
    """Stop moving blocks to the host tier: the request was admitted or has ended."""


class Load:
    """A load of the leading blocks of a prompt to the device, or (prefetch) to the host tier."""

    def __init__(
        self,
        parent: BlockKey,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int] | None,
        owners: Sequence[str] = (),
    ) -> None:
        self.parent = parent
        self.keys = keys
        self.owners = owners
        """Owners of the blocks of a prefetch; none: nobody."""
        self.block_ids = block_ids
        """None: to the host tier."""
        self.future: Future[int] = Future()
        self.lock = threading.Lock()
        """Held while device blocks are written, so that the load can be stopped safely."""
        self.num_done = 0
        self.rest: list[Callable[[], None]] = []
        """What waits for copies that go on when the load has ended, and gives back what they read."""
        self.failure: str | None = None
        """The last failure, other than a missing block."""
        self.probe: Future[None] = Future()
        """For a prefetch: done when the pool was asked which blocks it has, or nobody waits for that."""
        self.asks_pool = False
        """For a prefetch: whether the pool is asked."""
        self.queued_at = 0.0

    def stop(self) -> None:
        """Stop after the blocks moved so far."""
        self.finish(self.num_done)

    def finish(self, num_done: int, *, fails: bool = False) -> bool:
        """Set the result unless it is set; no device block is written afterwards.

        With `fails`, a failure becomes a StorageError.
        """
        with self.lock:
            if not self.probe.done():
                self.probe.set_result(None)
            if self.future.done():
                return False
            try:
                if fails and self.failure is not None and num_done < len(self.keys):
                    self.future.set_exception(StorageError(self.failure))
                else:
                    self.future.set_result(num_done)
            except InvalidStateError:  # cancelled just now
                return False
            return True


class LoadQueue:
    """Worker threads that load blocks."""

    def __init__(
        self,
        host: HostStore | None,
        stores: Callable[[], Sequence[BlockStore]],
        device: BlockCopy,
        estimator: LoadEstimator,
        clock: Callable[[], float],
        *,
        whereabouts: Whereabouts,
        asks: PoolAsks,
        num_threads: int = NUM_LOAD_THREADS,
        exclusive: bool = False,
        fails: bool = False,
        supervisor: Supervisor,
    ) -> None:
        """`host` receives prefetched blocks. `stores` returns the stores to read from, nearest first.

        `exclusive` removes from the host tier what was moved to the device. With `fails`, a load ends in
        StorageError if a tier couldn't deliver some of its blocks. `whereabouts` is told what prefetches
        found, `asks` what asking the pool took."""
        self._asks = asks
        self._fails = fails
        self._whereabouts = whereabouts
        self.counters = LoadCounters()
        self._host = host
        self._stores = stores
        self._device = device
        self._estimator = estimator
        self._clock = clock
        self._exclusive = exclusive
        self._lock = threading.Lock()
        self._order = itertools.count()
        self._tasks: PriorityQueue[tuple[int, int, Load | None]] = PriorityQueue()
        self._num_queued = 0
        self._deadlines: list[tuple[float, int, Load]] = []
        self._deadlines_changed = threading.Condition()
        self._is_closed = False
        self._helpers = ThreadPoolExecutor(num_threads, thread_name_prefix="stemma-deliver")
        self._supervisor = supervisor
        names = [f"stemma-load-{n}" for n in range(num_threads)]
        self._threads = [start_thread(name, partial(self._run, name), supervisor) for name in names]
        self._threads.append(start_thread("stemma-load-limit", self._watch, supervisor))

    @property
    def reserved_bytes(self) -> int:
        """Memory of the readers' buffers, allocated when a store that lends none is first read."""
        return (len(self._threads) - 1) * num_buffers(self._device.block_bytes) * self._device.block_bytes

    @property
    def num_queued_blocks(self) -> int:
        """Number of blocks of loads and prefetches that haven't ended."""
        return self._num_queued

    @property
    def num_waiting(self) -> int:
        """Number of loads and prefetches that no thread works on yet."""
        return self._tasks.qsize()

    def snapshot(self) -> LoadCounters:
        """Return a copy of the counters."""
        with self._lock:
            return replace(
                self.counters,
                loaded_blocks=Counter(self.counters.loaded_blocks),
                prefetched_blocks=Counter(self.counters.prefetched_blocks),
                lost_blocks=Counter(self.counters.lost_blocks),
            )

    def load(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], timeout_s: float | None
    ) -> Future[int]:
        """Copy blocks to the device; the result is how many leading ones arrived within the time limit."""
        task = Load(BlockKey(b""), keys, block_ids)
        self._submit(task, _LOAD, timeout_s)
        return task.future

    def load_ahead(self, keys: Sequence[BlockKey], block_ids: Sequence[int], timeout_s: float | None) -> Load:
        """As `load`, after all that requests wait for; `stop` of the result ends it."""
        task = Load(BlockKey(b""), keys, block_ids)
        self._submit(task, _AHEAD, timeout_s)
        return task

    def prefetch(
        self,
        parent: BlockKey,
        keys: Sequence[BlockKey],
        timeout_s: float,
        *,
        ask: PoolAsk,
        owners: Sequence[str] = (),
    ) -> Load:
        """Look for blocks and copy them to the host tier, if there is one, until `finish` is called on it.

        `ask`: how to ask the pool first. `owners`: whose the blocks are; none: nobody's.
        """
        task = Load(parent, keys, None, owners)
        task.asks_pool = ask is not PoolAsk.NOT
        task.queued_at = self._clock()
        if ask is not PoolAsk.AWAITED:
            task.probe.set_result(None)
        self._submit(task, _PREFETCH, timeout_s)
        return task

    def close(self) -> None:
        """End the threads; waiting loads end with the blocks they have. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for _ in self._threads[:-1]:
            self._tasks.put((_STOP, next(self._order), None))
        with self._deadlines_changed:
            self._deadlines_changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=10.0)
        self._helpers.shutdown(wait=False)

    def _submit(self, task: Load, rank: int, timeout_s: float | None) -> None:
        with self._lock:
            self._num_queued += len(task.keys)
            if task.block_ids is None:
                self.counters.num_prefetches += 1
            else:
                self.counters.num_loads += 1
        if timeout_s is not None:
            with self._deadlines_changed:
                heapq.heappush(self._deadlines, (self._clock() + timeout_s, next(self._order), task))
                self._deadlines_changed.notify_all()
        self._tasks.put((rank, next(self._order), task))

    # -- the time limit ---------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_closed:
            with self._deadlines_changed:
                now = self._clock()
                due = []
                while self._deadlines and self._deadlines[0][0] <= now:
                    due.append(heapq.heappop(self._deadlines)[2])
                if not due:
                    wait_s = self._deadlines[0][0] - now if self._deadlines else None
                    self._deadlines_changed.wait(wait_s)
            self._stop_late(due)
        with self._deadlines_changed:
            rest = [task for _, _, task in self._deadlines]
            self._deadlines.clear()
        self._stop_late(rest)

    def _stop_late(self, tasks: Iterable[Load]) -> None:
        for task in tasks:
            task.failure = "a load from a lower tier took too long"
            if task.finish(task.num_done, fails=self._fails) and task.block_ids is not None:
                with self._lock:
                    self.counters.num_late_loads += 1

    # -- worker threads ---------------------------------------------------------------------------

    def _run(self, name: str) -> None:
        reader = ChunkReader(self._device.block_bytes, pin_memory=self._device.pins_memory)
        while (task := self._tasks.get()[2]) is not None:
            try:
                self._work(task, reader)
            except StorageError as error:
                logger.warning("a load ended early: %s", error)
            except Exception as error:  # noqa: BLE001 - reported; the load ends with what it has
                self._supervisor.on_thread_failure(name, error)
            finally:
                task.finish(task.num_done, fails=self._fails)
                self._end_copies(task, name)
                with self._lock:
                    self._num_queued -= len(task.keys)

    def _end_copies(self, task: Load, name: str) -> None:
        for wait_for in task.rest:
            try:
                wait_for()
            except Exception as error:  # noqa: BLE001 - the device's: the next step says what it is
                self._supervisor.on_thread_failure(name, error)

    def _work(self, task: Load, reader: ChunkReader) -> None:
        with task.lock:
            if task.future.done() or not task.future.set_running_or_notify_cancel():
                return
        if task.block_ids is None:
            self._probe(task)
            if self._host is None:
                return
        passed_over = {Tier.POOL} if task.block_ids is None and not task.asks_pool else set()
        while task.num_done < len(task.keys) and not task.future.done():
            if task.block_ids is None:
                self._skip_what_is_there(task)
            store, keys = self._next_run(task, passed_over)
            if store is None:
                return
            before = task.num_done
            results = self._move(task, store, keys, reader)
            if not results:
                return
            passed_over = passed_over if task.num_done == before else set()
            if results[-1] is not ReadResult.HIT:
                passed_over.add(store.tier)
                if results[-1] is not ReadResult.MISS:
                    task.failure = f"a block couldn't be loaded from the {store.tier} tier: {results[-1]}"
                self._whereabouts.note_lost(keys[len(results) - 1])
                with self._lock:
                    self.counters.lost_blocks[store.tier, results[-1]] += 1

    def _next_run(self, task: Load, passed_over: set[Tier]) -> tuple[BlockStore | None, Sequence[BlockKey]]:
        """Return the nearest store that has the next block, and the run of blocks it has."""
        ahead = task.keys[task.num_done : task.num_done + RUN_BLOCKS]
        for store in self._stores():
            if store.tier in passed_over or (task.block_ids is None and store.tier is Tier.HOST):
                continue
            if count := self._num_there(store, ahead):
                return store, ahead[:count]
        return None, ()

    def _num_there(self, store: BlockStore, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks a store has. A pool isn't asked again for what was seen in it."""
        if store.tier is Tier.POOL:
            seen = _num_leading(self._whereabouts.is_in_pool(key) for key in keys)
            if seen:
                return seen
        there = store.exists_many(keys)
        if store.tier is Tier.POOL:
            self._note_pool(keys, there)
        return _num_leading(there)

    def _probe(self, task: Load) -> None:
        """PoolAsk the pool for what no nearer store has: it is too slow to ask on the step loop."""
        pool = next((store for store in self._stores() if store.tier is Tier.POOL), None)
        if pool is not None and task.asks_pool:
            local = [store.exists_many(task.keys) for store in self._stores() if store is not pool]
            missing = [key for n, key in enumerate(task.keys) if not any(there[n] for there in local)]
            there = pool.exists_many(missing)
            self._asks.observe(len(missing), sum(there), self._clock() - task.queued_at)
            self._note_pool(missing, there)
        with task.lock:
            if not task.probe.done():
                task.probe.set_result(None)

    def _note_pool(self, keys: Sequence[BlockKey], there: Sequence[bool]) -> None:
        """Note which blocks a probe found in the pool; drop the others' notes, to write them again."""
        found = dict(zip(keys, there, strict=True))
        self._whereabouts.note_in_pool([key for key in keys if found[key]])
        self._whereabouts.note_not_in_pool([key for key in keys if not found[key]])

    def _skip_what_is_there(self, task: Load) -> None:
        """Count leading blocks of a prefetch that are in the host tier already."""
        host = self._host
        while host is not None and task.num_done < len(task.keys):
            if not host.exists_many([task.keys[task.num_done]])[0]:
                return
            task.num_done += 1

    def _move(
        self, task: Load, store: BlockStore, keys: Sequence[BlockKey], reader: ChunkReader
    ) -> list[ReadResult]:
        """Move one run; return the results up to and including the first that isn't a hit."""
        start = self._clock()
        if store is self._host and not self._host.packs:
            results = self._from_host(task, self._host, keys)
        else:
            results = self._from_slow(task, store, keys, reader)
            if store is self._host and self._exclusive:
                store.remove(keys[: results.count(ReadResult.HIT)])
        self._estimator.observe_load(store.tier, len(results), self._clock() - start)
        return results

    def _from_slow(
        self, task: Load, store: BlockStore, keys: Sequence[BlockKey], reader: ChunkReader
    ) -> list[ReadResult]:
        """Read chunk by chunk, while the previous chunk is verified and copied."""
        before = task.num_done
        results: list[ReadResult] = []

        def take(start: int, chunk: Chunk) -> None:
            try:
                got = chunk.prove()
                for key, result in zip(keys[start : start + chunk.num_keys], got, strict=True):
                    if result is not ReadResult.HIT:
                        self._whereabouts.note_lost(key)
                if task.num_done == before + start:  # else there is a gap, or the load has ended
                    got = _until_first_failure(got)
                    self._deliver(task, chunk.places[: got.count(ReadResult.HIT)], store.tier)
                    results.extend(got)
            finally:
                chunk.free()

        taking: Future[None] | None = None
        last = start = 0
        try:
            while start < len(keys) and not task.future.done() and task.num_done >= before + last:
                chunk = reader.read(store, keys[start:])
                if taking is not None:
                    wait([taking])
                once = _Once(partial(take, start, chunk))
                try:
                    self._helpers.submit(once)
                except RuntimeError:
                    # Closed by another thread, or no thread can be started; then the executor has queued it.
                    if once.future.cancel():
                        chunk.prove()
                        chunk.free()
                        break
                taking = once.future
                last, start = start, start + chunk.num_keys
        finally:
            # When this returns, even by an exception, the next load uses the buffers.
            if taking is not None:
                wait([taking])
        if taking is not None:
            taking.result()
        return results

    def _from_host(self, task: Load, store: HostStore, keys: Sequence[BlockKey]) -> list[ReadResult]:
        views = store.borrow(keys)
        held = [key for key, view in zip(keys, views, strict=True) if view is not None]
        results = _until_first_failure([ReadResult.MISS if v is None else ReadResult.HIT for v in views])
        count, copied = results.count(ReadResult.HIT), False
        rest: Callable[[], None] | None = None

        def end() -> None:
            try:
                if rest is not None:
                    rest()
            finally:
                store.unpin(held)
            if self._exclusive and copied:
                store.remove(keys[:count])

        try:
            with task.lock:
                if task.future.done():
                    return results
                assert task.block_ids is not None
                block_ids = task.block_ids[task.num_done : task.num_done + count]
                rest = self._device.begin(block_ids, [view for view in views[:count] if view is not None])
                task.num_done += count
                copied = True
        finally:
            if rest is None:
                end()
            else:
                task.rest.append(end)
        with self._lock:
            self.counters.loaded_blocks[Tier.HOST] += count
        return results

    def _deliver(self, task: Load, places: Sequence[memoryview], tier: Tier) -> None:
        """Copy the next blocks from these buffers to the destination of the task."""
        count = len(places)
        if count == 0:
            return
        if task.block_ids is None:
            self._deliver_to_host(task, places, tier)
            return
        with task.lock:
            if task.future.done():
                return
            first = task.num_done
            block_ids = task.block_ids[first : first + count]
            sources = [torch.frombuffer(place, dtype=torch.uint8) for place in places]
            self._device.into(block_ids, sources, beside_reads=True)
            task.num_done += count
        self._whereabouts.drop_origin(task.keys[first : first + count])
        with self._lock:
            self.counters.loaded_blocks[tier] += count

    def _deliver_to_host(self, task: Load, places: Sequence[memoryview], tier: Tier) -> None:
        host = self._host
        assert host is not None, "a prefetch needs a host tier"
        first, count = task.num_done, len(places)
        parents = [task.parent, *task.keys][first : first + count]
        keys = task.keys[first : first + count]
        if not task.future.done():
            # Before the put: as soon as a block is stored, the step loop may find it and ask for its origin.
            self._whereabouts.note_origin(tier, keys)
        owners = task.owners[first : first + count] or [""] * count
        source = next((store for store in self._stores() if store.tier is tier), None)
        notes = [NO_NOTES] * count if source is None else source.notes_many(keys)
        host.put_many(
            [
                BlockPut(key, parent, place, note.hint, owner, note.session)
                for key, parent, place, note, owner in zip(keys, parents, places, notes, owners, strict=True)
            ]
        )
        task.num_done += count
        with self._lock:
            self.counters.prefetched_blocks[tier] += count


class _Once:
    """Work for an executor that runs once, or never if `future` is cancelled before."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.future: Future[None] = Future()
        self._work = work

    def __call__(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


def _num_leading(there: Iterable[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, there))


def _until_first_failure(results: list[ReadResult]) -> list[ReadResult]:
    bad = next((n for n, result in enumerate(results) if result is not ReadResult.HIT), None)
    return results if bad is None else results[: bad + 1]
