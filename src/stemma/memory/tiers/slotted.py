"""Base of the host and the disk tier: fixed slots, an index under a lock, bytes moved outside the lock.

A read pins its blocks while their bytes are copied; a write reserves slots that lookups don't find until they
are complete. So the lock is held only for work on tables, and many threads can move bytes at once.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from stemma.errors import StorageError
from stemma.memory.device.block_codec import BlockCodec
from stemma.memory.kv_events import BlocksCopied, BlocksRemoved, KVEventSink
from stemma.memory.tiers.block_store import (
    BlockPut,
    BlockStore,
    HeldBlock,
    PutResult,
    ReadResult,
    Storable,
    StoreCounters,
    check_buffers,
)
from stemma.memory.tiers.device_block import NO_NOTES, BlockNotes
from stemma.memory.tiers.index import TierIndex
from stemma.memory.tiers.slot_room import SlotRoom
from stemma.prefix.eviction.policy import BlockTraits, EvictionPolicy
from stemma.prefix.keys import fingerprints
from stemma.types import NO_HINT, BlockKey, RetentionHint

_SLICE_BLOCKS = 256
"""Due blocks looked at in one hold of the lock: less than a millisecond."""
_PAUSE_S = 0.0002
_SET_BACK_S = 2.0
"""A clock that is behind by more was set back; by less, it is being adjusted."""
_TABLE_BYTES = 500
"""Bytes per block in a store's tables: its key, its parent's key, the dict entry, times."""


def table_bytes(capacity_blocks: int, policy: EvictionPolicy) -> int:
    """Return the approximate bytes of the tables of a full store, including the policy's."""
    return _TABLE_BYTES * capacity_blocks + policy.reserved_bytes(capacity_blocks)


class SlottedStore(BlockStore):
    """A local store of `capacity_blocks` slots. A subclass moves the bytes of a slot."""

    is_local = True

    def __init__(
        self,
        block_bytes: int,
        capacity_blocks: int,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        *,
        default_ttl_s: float | None = None,
        codec: BlockCodec | None = None,
        room: SlotRoom | None = None,
    ) -> None:
        """`codec` packs blocks; `room` then says what fits, with more slots than whole blocks."""
        self.block_bytes = block_bytes
        self._codec = codec
        self._room = room
        self._lengths: npt.NDArray[np.uint32] = np.full(capacity_blocks, block_bytes, dtype=np.uint32)
        """By slot: bytes of its block as it is stored; fewer than `block_bytes`: packed."""
        self._stored_bytes = 0
        """Sum of the lengths of live blocks."""
        self.counters = StoreCounters()
        self._clock = clock
        self._latest = -np.inf
        self._set_back_s = 0.0
        """By how much the clock was set back, all in all."""
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_moving = 0
        """Number of calls that move bytes now; files and arenas are freed only at zero."""
        self._policy = policy
        self._index = TierIndex(capacity_blocks, policy)
        self._default_ttl_s = np.inf if default_ttl_s is None else default_ttl_s
        self._used_at: npt.NDArray[np.float64] = np.zeros(capacity_blocks, dtype=np.float64)
        """By slot: when its block was last read or written."""
        self._ttl_s: npt.NDArray[np.float64] = np.full(capacity_blocks, np.inf)
        """By slot: seconds of disuse after which its block expires; infinite for free slots."""
        self._hints: list[RetentionHint] = [NO_HINT] * capacity_blocks
        """By slot: what its block came with."""
        self._sessions: npt.NDArray[np.uint32] = np.zeros(capacity_blocks, dtype=np.uint32)
        """By slot: which conversation left its block."""
        self._writing: set[BlockKey] = set()
        self._is_open = True

    @abstractmethod
    def _read(self, slots: Sequence[int], into: Sequence[memoryview]) -> list[tuple[ReadResult, str]]:
        """Copy live slots into buffers, without the lock; a result other than HIT carries its reason."""

    def _prove(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        read: Sequence[memoryview],
        outcomes: Sequence[tuple[ReadResult, str]],
    ) -> Sequence[tuple[ReadResult, str]]:
        """Return `outcomes`, but no HIT whose bytes aren't those of its key. Without the lock."""
        return outcomes

    @abstractmethod
    def _write(self, slots: Sequence[int], blocks: Sequence[BlockPut]) -> list[tuple[PutResult, str]]:
        """Fill reserved slots, without the lock; a result other than STORED carries its reason."""

    def _prepare(self, blocks: Sequence[Storable]) -> None:
        """Make room for blocks that are about to be put, if that is slow. Without the lock."""
        return None

    def _reserve(self) -> int | None:
        """Return a slot to write without evicting, or None. Called with the lock."""
        return self._index.reserve()

    def _refusal(self) -> str | None:
        """Return why the store takes no blocks at present, or None. Called with the lock."""
        return None

    def _dropped(self, slots: Sequence[int]) -> None:
        """Blocks left these slots, evicted or removed. Called with the lock."""

    def _renewed(self, slots: Sequence[int]) -> None:
        """The blocks in these slots have other hints. Called with the lock."""

    @abstractmethod
    def _free_all(self) -> None:
        """Free memory or files. Called once, with the lock, when no more bytes move."""

    @override
    def watch(self, sink: KVEventSink) -> None:
        def changed(key: BlockKey, is_stored: bool) -> None:
            sink.put((BlocksCopied if is_stored else BlocksRemoved)((key,), self.tier))

        with self._lock:
            self._index.watcher = changed
            held = tuple(key for _, key, _ in self._index.live())
        if held:  # found on disk when it was opened
            sink.put(BlocksCopied(held, self.tier))

    @property
    def reserved_bytes(self) -> int:
        """Upper limit of the memory of the tables that find and rank blocks."""
        return table_bytes(self._index.capacity_blocks, self._policy)

    @property
    def num_policy_failures(self) -> int:
        """How often the eviction policy raised and LRU took over: 0, or 1."""
        return self._index.num_policy_failures

    @property
    @override
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    @override
    def capacity_blocks(self) -> int:
        if self._room is None:
            return self._index.capacity_blocks
        return self._room.capacity(len(self._index), self._stored_bytes)

    @property
    @override
    def stored_bytes(self) -> int:
        return self._stored_bytes

    def exists_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return which keys are held. Takes no lock, so the step loop never waits for a thread that moves
        bytes."""
        self._check_open()
        now = self._clock()
        found = [self._index.find(key) for key in keys]
        return [slot is not None and not self._is_expired(slot, now) for slot in found]

    @override
    def notes_many(self, keys: Sequence[BlockKey]) -> list[BlockNotes]:
        found = [self._index.find(key) for key in keys]
        return [NO_NOTES if slot is None else self._notes(slot) for slot in found]

    def _notes(self, slot: int) -> BlockNotes:
        return BlockNotes(self._hints[slot], self._sessions.item(slot))

    @override
    def touch(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._check_open()
            now = self._now()
            slots = [slot for key in keys if (slot := self._index.find(key)) is not None]
            self._index.touch(slots, self._ranked_at(now))
            self._used_at[slots] = now

    @override
    def renew(self, hints: Mapping[BlockKey, RetentionHint]) -> None:
        with self._lock:
            self._check_open()
            changed: dict[RetentionHint, list[int]] = {}
            for key, hint in hints.items():
                if (slot := self._index.find(key)) is not None and self._hints[slot] != hint:
                    self._keep_hint(slot, hint)
                    changed.setdefault(hint, []).append(slot)
            for hint, slots in changed.items():
                self._index.renew(slots, hint, self._ranked_at(self._now()))
                self._renewed(slots)

    @override
    def get_many(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[ReadResult]:
        return self.fetch_many(keys, into)()

    def fetch_many(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview]
    ) -> Callable[[], list[ReadResult]]:
        """Read blocks; return the function that proves them. Until then they stay pinned, and the store
        open."""
        check_buffers(keys, into, self.block_bytes)
        with self._lock:
            slots = self._acquire(keys)
            self._num_moving += 1
        at = [n for n, slot in enumerate(slots) if slot is not None]
        found = [slot for slot in slots if slot is not None]
        buffers = [into[n] for n in at]
        try:
            outcomes = self._read(found, buffers)
        except BaseException:
            self._end_read([keys[n] for n in at])
            raise
        return lambda: self._proven(keys, at, found, buffers, outcomes)

    def _proven(
        self,
        keys: Sequence[BlockKey],
        at: Sequence[int],
        slots: Sequence[int],
        buffers: Sequence[memoryview],
        outcomes: Sequence[tuple[ReadResult, str]],
    ) -> list[ReadResult]:
        """Verify what was read for ``keys[at]`` from `slots`; drop what failed, unpin, count."""
        try:
            outcomes = self._prove(slots, [keys[n] for n in at], buffers, outcomes)
        except BaseException:
            self._end_read([keys[n] for n in at])
            raise
        results = [ReadResult.MISS] * len(keys)
        with self._lock:
            for n, slot, (result, reason) in zip(at, slots, outcomes, strict=True):
                results[n] = result
                self._index.unpin(keys[n])
                if result is not ReadResult.HIT:
                    self.counters.reasons[reason] += 1
                    if self._index.find(keys[n]) == slot:
                        self._drop([slot])
            self._moved()
            self.counters.reads.update(results)
            self.counters.read_bytes += results.count(ReadResult.HIT) * self.block_bytes
        return results

    def _end_read(self, keys: Sequence[BlockKey]) -> None:
        """Unpin the blocks of a read that raised."""
        with self._lock:
            for key in keys:
                self._index.unpin(key)
            self._moved()

    def put_many(self, blocks: Sequence[BlockPut]) -> list[PutResult]:
        """Store blocks. Those of one call and their parents don't evict each other."""
        check_buffers([b.key for b in blocks], [b.data for b in blocks], self.block_bytes)
        return self._put(blocks, lambda slots, at: self._write(slots, [blocks[n] for n in at]))

    def _put(
        self,
        blocks: Sequence[Storable],
        write: Callable[[Sequence[int], Sequence[int]], list[tuple[PutResult, str]]],
    ) -> list[PutResult]:
        """Reserve slots, let ``write(slots, positions in blocks)`` fill them, and make them live."""
        self._prepare(blocks)
        with self._lock:
            planned = self._plan(blocks)
            self._num_moving += 1
        results = [result for result, _ in planned]
        at = [n for n, (_, slot) in enumerate(planned) if slot is not None]
        slots = [slot for _, slot in planned if slot is not None]
        outcomes = [(PutResult.ERROR, "raised")] * len(slots)
        try:
            outcomes = write(slots, at)
        finally:
            with self._lock:
                self._moved()
                now = self._now()
                for n, slot, (result, reason) in zip(at, slots, outcomes, strict=True):
                    results[n] = result
                    self._writing.remove(blocks[n].key)
                    self._settle(slot, result is PutResult.STORED)
                    if result is PutResult.STORED:
                        self._commit(blocks[n], slot, now)
                    else:
                        self._index.free(slot)
                        self.counters.reasons[reason] += 1
                self._keep_quotas()
                self.counters.puts.update(results)
                self.counters.written_bytes += results.count(PutResult.STORED) * self.block_bytes
        return results

    def _settle(self, slot: int, is_stored: bool) -> None:
        """Count what a reserved slot takes now: what was written, or all of it if that failed halfway."""
        if self._room is None:
            return
        length = self._lengths.item(slot) if is_stored else self.block_bytes
        self._discard(slot, self._room.settle(slot, length))
        if not is_stored:
            self._room.leave([slot])

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Set how many blocks each owner may hold. What is read or pinned now goes at a later put."""
        with self._lock:
            self._check_open()
            slots = np.array([slot for slot, _, _ in self._index.live()], dtype=np.int64)
            oldest_first = slots[np.argsort(self._used_at[slots], kind="stable")].tolist()
            self._index.set_quotas(quotas, oldest_first)
            self._keep_quotas()

    def newest(self, max_blocks: int) -> list[HeldBlock]:
        """Return the `max_blocks` blocks that entered last, newest first; some 0.3 us a block under the
        lock."""
        with self._lock:
            self._check_open()
            now = self._clock()
            return [
                HeldBlock(key, parent, max(0.0, now - self._used_at.item(slot)))
                for slot, key, parent in self._index.newest(max_blocks)
            ]

    @override
    def remove(self, keys: Sequence[BlockKey]) -> int:
        with self._lock:
            self._check_open()
            slots = {slot for key in keys if (slot := self._index.find(key)) is not None}
            return self._drop([slot for slot in slots if not self._index.is_pinned(slot)])

    @override
    def pin(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            self._check_open()
            present = [key in self._index for key in keys]
            for key, there in zip(keys, present, strict=True):
                if there:
                    self._index.pin(key)
            return present

    @override
    def unpin(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._index.unpin(key)

    @override
    def clear(self) -> int:
        with self._lock:
            self._check_open()
            return self._drop(self._index.unpinned())

    @override
    def expire(self) -> int:
        total = self._drop_due(self._ttl_s)
        with self._lock:
            self.counters.num_expired += total
        return total

    def drop_unused(self, seconds: float) -> int:
        """Drop unpinned blocks, leaves first, that were unused for `seconds`; return how many."""
        return self._drop_due(np.full(len(self._used_at), seconds))

    def _drop_due(self, limits_s: npt.NDArray[np.float64]) -> int:
        """Drop unpinned blocks, leaves first, unused for longer than their slot's limit; return how many.

        Each due slot is looked at once, and once more for each child that was dropped. The lock, which the
        step loop may wait for, is released after every few: so each is judged when its turn comes.
        """
        with self._lock:
            self._check_open()
            due = np.flatnonzero(self._now() - self._used_at > limits_s).tolist()
        total = 0
        while due:
            with self._lock:
                if not self._is_open:
                    break
                total += self._drop_slice(due, limits_s)
            time.sleep(_PAUSE_S)  # a lock that is taken again at once is never another thread's
        return total

    def _drop_slice(self, due: list[int], limits_s: npt.NDArray[np.float64]) -> int:
        """Look at some of `due`, from the end, which is emptied that far; return how many were dropped."""
        now, dropped = self._now(), list[int]()
        for _ in range(_SLICE_BLOCKS):
            if not due:
                break
            slot = due.pop()
            is_due = self._index.is_live(slot) and now - self._used_at[slot] > limits_s[slot]
            if not is_due or not self._index.is_leaf(slot):
                continue
            parent = self._index.parent_slot(slot)
            self._drop([slot])
            dropped.append(slot)
            if parent is not None and not self._index.has_children(parent):
                due.append(parent)  # it may have had its turn before
        return len(dropped)

    def close(self) -> None:
        """Free memory and files once the calls that move bytes now have ended."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._idle.wait_for(lambda: self._num_moving == 0)
            self._free_all()

    @override
    def check(self) -> None:
        with self._lock:
            self._index.check()

    def _now(self) -> float:
        """Return the clock's time, which may stand still for a moment. Called with the lock.

        Not earlier than at the last call, unless the clock was set back: then blocks used in its former
        future count as used now, or nothing would expire until that future comes.
        """
        now = self._clock()
        if now < self._latest - _SET_BACK_S:
            self._set_back_s += self._latest - now
            self._latest = now
            np.minimum(self._used_at, now, out=self._used_at)
        self._latest = max(self._latest, now)
        return self._latest

    def _ranked_at(self, now: float) -> float:
        """Return what the eviction policy is told instead of `_now()`: a time that is never set back."""
        return now + self._set_back_s

    def _moved(self) -> None:
        self._num_moving -= 1
        if self._num_moving == 0:
            self._idle.notify_all()

    def _check_open(self) -> None:
        if not self._is_open:
            raise StorageError(f"the {self.tier} tier is closed")

    def _is_expired(self, slot: int, now: float) -> bool:
        return bool(now - self._used_at[slot] > self._ttl_s[slot])

    def _acquire(self, keys: Sequence[BlockKey]) -> list[int | None]:
        """Pin and touch the keys that are held; None for missing and expired ones."""
        self._check_open()
        now = self._now()
        slots = [self._index.find(key) for key in keys]
        slots = [None if slot is None or self._is_expired(slot, now) else slot for slot in slots]
        found = [slot for slot in slots if slot is not None]
        self._index.touch(found, self._ranked_at(now))
        self._used_at[found] = now
        for key, slot in zip(keys, slots, strict=True):
            if slot is not None:
                self._index.pin(key)
        return slots

    def _plan(self, blocks: Sequence[Storable]) -> list[tuple[PutResult, int | None]]:
        """Decide what happens to each block and reserve the slots to write."""
        self._check_open()
        refusal, now = self._refusal(), self._now()
        held = [k for k in {k for b in blocks for k in (b.key, b.parent)} if k in self._index]
        for key in held:
            self._index.pin(key)
        planned: list[tuple[PutResult, int | None]] = []
        try:
            for block in blocks:
                planned.append(self._plan_one(block, refusal, now))  # noqa: PERF401 - kept if one raises
        except BaseException:
            for block, (_, slot) in zip(blocks, planned, strict=False):
                if slot is not None:
                    self._writing.remove(block.key)
                    self._settle(slot, is_stored=False)
                    self._index.free(slot)
            raise
        finally:
            for key in held:
                self._index.unpin(key)
        return planned

    def _plan_one(self, block: Storable, refusal: str | None, now: float) -> tuple[PutResult, int | None]:
        if (existing := self._index.find(block.key)) is not None:
            self._index.touch([existing], self._ranked_at(now))
            self._used_at[existing] = now
            return PutResult.EXISTS, None
        if refusal is not None or block.key in self._writing:
            self.counters.reasons[refusal or "being_written"] += 1
            return PutResult.DROPPED, None
        slot = self._take_slot()
        if slot is None:
            self.counters.reasons["full"] += 1
            return PutResult.NO_SPACE, None
        self._writing.add(block.key)
        return PutResult.STORED, slot

    def _take_slot(self) -> int | None:
        has_room = self._room is None or self._room.fits()
        if not has_room:
            self._evict_one()  # the slot that it leaves is taken next
        slot = self._reserve()
        if slot is None and has_room and self._evict_one():
            slot = self._index.reserve()
        if slot is not None and self._room is not None:
            if not self._find_pages(slot, self._room):
                self._index.free(slot)
                self._room.leave([slot])
                return None
            self._room.reserve(slot)
        return slot

    def _find_pages(self, slot: int, room: SlotRoom) -> bool:
        """Take pages from other slots, and evict blocks, until this slot may have all of its bytes."""
        while not room.fits(slot):
            if (other := room.pop_idle(slot)) is None and not self._evict_one():
                return False
            if other is not None:
                self._discard(other, room.give_back(other))
        return True

    def _discard(self, slot: int, unused: range) -> None:
        """Give back the pages of these bytes of a slot, if any. Called with the lock."""

    def _evict_one(self) -> bool:
        if (evicted := self._evict()) is not None:
            self._evicted(evicted)
        return evicted is not None

    def _evict(self) -> int | None:
        return self._index.evict(self._ranked_at(self._now()))

    def _keep_quotas(self) -> None:
        """Evict blocks of owners that hold too many. Called with the lock."""
        while self._index.num_over_quota and (slot := self._evict()) is not None:
            self._evicted(slot)

    def _evicted(self, slot: int) -> None:
        """Note that a block was evicted from a slot. Called with the lock."""
        self._ttl_s[slot] = np.inf
        self._left([slot])
        self.counters.num_evicted += 1

    def _left(self, slots: Sequence[int]) -> None:
        self._stored_bytes -= int(self._lengths[slots].sum())
        if self._room is not None:
            self._room.leave(slots)
        self._dropped(slots)

    def _commit(self, block: Storable, slot: int, now: float) -> None:
        traits = BlockTraits(fingerprints([block.key]), hint=block.hint, owner=block.owner)
        self._index.commit(slot, block.key, block.parent, self._ranked_at(now), traits)
        self._used_at[slot] = now
        self._stored_bytes += self._lengths.item(slot)
        self._sessions[slot] = block.session
        self._keep_hint(slot, block.hint)

    def _keep_hint(self, slot: int, hint: RetentionHint) -> None:
        self._hints[slot] = hint
        self._ttl_s[slot] = self._default_ttl_s if hint.ttl_s is None else hint.ttl_s

    def _drop(self, slots: Sequence[int]) -> int:
        ranked_at = self._ranked_at(self._now())
        for slot in slots:
            self._index.drop(slot, ranked_at)
            self._ttl_s[slot] = np.inf
        if slots:
            self._left(slots)
        return len(slots)
