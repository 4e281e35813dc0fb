"""Reading blocks from a pool, batch by batch.

A block is read into a staging slot and, once its header is verified, lent or copied out. So a late read
writes into a slot that nobody else has: a slot is free again only after the backend's call has ended and the
loan is freed. If the destination is in registered memory the block is read in place; such a call is waited
for until it ends.

One batch at a time: Mooncake's client spins while it waits, so a second concurrent batch slows the first
(docs/project/log.md). Callers that want more overlap call from several threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from stemma.memory.device.block_codec import expand, unpack
from stemma.memory.tiers.block_store import Loan, ReadResult
from stemma.memory.tiers.device_block import BlockNotes
from stemma.memory.tiers.pool.absent import AbsentKeys
from stemma.memory.tiers.pool.backend import Parts
from stemma.memory.tiers.pool.envelope import Damage, damage, notes_in, payload_bytes
from stemma.memory.tiers.pool.guard import Guard
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.registered import RegisteredMemory
from stemma.memory.tiers.pool.value_staging import Staging
from stemma.memory.tiers.recent_keys import RecentKeys
from stemma.types import BlockKey

BATCH_BLOCKS = 64
"""Maximum number of blocks per backend call."""
_FIRST_LOAN = 16
FAILED_FOR_S = 5.0
ABSENT_FOR_S = 0.5
"""How long the negative cache keeps a key that couldn't be read, or wasn't there."""


_PARALLEL_BYTES = 8 * 2**20
"""Size from which a second thread is worth waking."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One block to read."""

    at: int
    """Its position in the caller's list."""
    key: BlockKey
    name: str
    into: memoryview


class Reader:
    """Reads blocks through a guard."""

    def __init__(
        self,
        guard: Guard,
        names: PoolKeys,
        staging: Staging,
        registered: RegisteredMemory,
        absent: AbsentKeys,
        notes: RecentKeys[BlockNotes],
    ) -> None:
        """`notes` receives what the blocks that are read came with."""
        self._notes = notes
        self._guard = guard
        self._names = names
        self._staging = staging
        self._registered = registered
        self._absent = absent
        self._most_lent = _FIRST_LOAN
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="stemma-pool-check")

    def read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[ReadResult]:
        """Read each key into its buffer; after a late batch the rest counts as late, untried."""
        results = [ReadResult.MISS] * len(keys)
        waiting = [
            _Wanted(at, key, self._names.own(key), buffer)
            for at, (key, buffer) in enumerate(zip(keys, into, strict=True))
            if key not in self._absent
        ]
        self._guard.count_reason("negative_cache", len(keys) - len(waiting))
        while waiting:
            found = self._read_batch(waiting)
            for wanted, result in zip(waiting, found, strict=False):
                results[wanted.at] = result
            waiting = waiting[len(found) :]
        return results

    def lend(self, keys: Sequence[BlockKey]) -> Loan:
        """Read the first few keys into the free slots; wait for one within the deadline.

        The batch size follows the backend's speed: large batches are faster, but one that exceeds the
        deadline is lost and opens the circuit.
        """
        keys = keys[: self._most_lent]
        count = next((at for at, key in enumerate(keys) if key in self._absent), len(keys))
        if count == 0:
            self._guard.count_reason("negative_cache")
            return Loan([ReadResult.MISS], ())
        if not self._guard.admits():
            self._guard.count_reason("circuit_open", len(keys))
            return Loan([ReadResult.ERROR] * len(keys), ())
        slots = self._staging.slots.take(count, self._guard.deadline_s)
        if not slots:
            self._guard.count_reason("no_slot", len(keys))
            return Loan([ReadResult.LATE] * len(keys), ())
        free = partial(self._staging.slots.free, slots)
        batch = [
            _Wanted(at, key, self._names.own(key), slot.payload)
            for at, (key, slot) in enumerate(zip(keys, slots, strict=False))
        ]
        names, parts = [wanted.name for wanted in batch], [(slot.whole,) for slot in slots]
        call = self._guard.start(self._guard.backend.get_many, names, parts)
        start = time.monotonic()
        answer = self._guard.finish(call, len(batch))
        self._adapt(len(batch), (time.monotonic() - start) / self._guard.deadline_s)
        if answer.value is None:
            call.add_done_callback(lambda _: free())  # a late call may still write into the slots
            return Loan([ReadResult.LATE if answer.late else ReadResult.ERROR] * len(keys), ())
        try:
            results = self._take(batch, [(slot.header, slot.payload) for slot in slots], answer.value)
        except BaseException:
            free()
            raise
        return Loan(results, [slot.payload for slot in slots], free)

    def _adapt(self, num_blocks: int, share: float) -> None:
        """Choose the size of the next loan after one that took this share of the deadline."""
        if share > 0.5:
            self._most_lent = max(1, num_blocks // 2)
        elif share < 0.125 and num_blocks == self._most_lent:
            self._most_lent = min(BATCH_BLOCKS, 2 * num_blocks)

    def _read_batch(self, waiting: list[_Wanted]) -> list[ReadResult]:
        """Return results of the first few of `waiting`; of all, if reading on is pointless."""
        if not self._guard.admits():
            self._guard.count_reason("circuit_open", len(waiting))
            return [ReadResult.ERROR] * len(waiting)
        batch = waiting[:BATCH_BLOCKS]
        direct = all(self._registered.covers(wanted.into) for wanted in batch)
        free: Callable[[], None]
        parts: list[Parts]
        if direct:
            headers = self._staging.headers.take(len(batch), self._guard.deadline_s)
            free = partial(self._staging.headers.free, headers)
            values = [(header, wanted.into) for header, wanted in zip(headers, batch, strict=False)]
            parts = list(values)
        else:
            slots = self._staging.slots.take(len(batch), self._guard.deadline_s)
            free = partial(self._staging.slots.free, slots)
            values = [(slot.header, slot.payload) for slot in slots]
            parts = [(slot.whole,) for slot in slots]
        if not values:  # all slots are held by calls that don't end
            self._guard.count_reason("no_slot", len(waiting))
            return [ReadResult.LATE] * len(waiting)
        batch = batch[: len(values)]
        call = self._guard.start(self._guard.backend.get_many, [wanted.name for wanted in batch], parts)
        answer = self._guard.finish(call, len(batch), settle=direct)
        try:
            if answer.late:
                return [ReadResult.LATE] * len(waiting)
            if answer.value is None:
                return [ReadResult.ERROR] * len(batch)
            return self._take(batch, values, answer.value)
        finally:
            call.add_done_callback(lambda _: free())

    def _take(
        self,
        batch: list[_Wanted],
        values: list[tuple[memoryview, memoryview]],
        found: list[ReadResult],
    ) -> list[ReadResult]:
        """Check each value, (header, payload), and copy it to its destination; remove damaged values."""

        def check(part: slice) -> list[ReadResult]:
            checked = []
            for wanted, (header, payload), result in zip(batch[part], values[part], found[part], strict=True):
                checked.append(self._checked(wanted, header, payload, result))
                if checked[-1] is ReadResult.HIT and not _take_block(header, payload, wanted.into):
                    self._guard.count_reason(Damage.CHECKSUM.value)
                    checked[-1] = ReadResult.CORRUPT
            return checked

        # One core doesn't reach the memory's bandwidth, and no transfer is running that this would slow.
        is_much = sum(payload.nbytes for _, payload in values) >= _PARALLEL_BYTES
        half = len(batch) // 2 if is_much else 0
        helped = self._helper.submit(check, slice(half)) if half else None
        rest = check(slice(half, None))
        results = [*(helped.result() if helped else ()), *rest]
        for wanted, result in zip(batch, results, strict=True):
            if result in (ReadResult.MISS, ReadResult.CORRUPT):
                self._absent.add(wanted.key, ABSENT_FOR_S)
            elif result is ReadResult.ERROR:
                self._absent.add(wanted.key, FAILED_FOR_S)
        spoiled = [
            wanted.name for wanted, result in zip(batch, results, strict=True) if result is ReadResult.CORRUPT
        ]
        if spoiled:
            self._guard.remove(spoiled)
        return results

    def _checked(
        self, wanted: _Wanted, header: memoryview, payload: memoryview, result: ReadResult
    ) -> ReadResult:
        if result is ReadResult.HIT:
            found = damage(wanted.name, header, payload)
            if found is None:
                self._notes.note({wanted.key: notes_in(header)})
                return ReadResult.HIT
            self._guard.count_reason(found.value)
            return ReadResult.CORRUPT
        if result is ReadResult.CORRUPT:
            self._guard.count_reason("wrong_length")
        elif result is ReadResult.ERROR:
            self._guard.count_reason("read_failed")
        elif result is ReadResult.LATE:
            self._guard.count_reason("late")
        return result


def _take_block(header: memoryview, payload: memoryview, into: memoryview) -> bool:
    """Bring the block behind a sound header to its destination, unpacked; return whether it is one."""
    length = payload_bytes(header)
    if length < into.nbytes:
        return expand(into, length) if into is payload else unpack(payload[:length], into)
    if into is not payload:
        # Not a slice assignment: numpy releases the GIL.
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(payload, np.uint8))
    return True
