"""Reading blocks from a pool, batch by batch.

A block is read into a staging slot and copied out once its header proves it. So a read that comes late
writes into a slot that nobody uses any more, and never into memory that its caller has given to something
else. Where the destination lies in registered memory it is read in place; such a call is waited for to its
very end.

One batch at a time: Mooncake's client spins while it waits, so a second batch under way takes from the
first (docs/log.md). Callers that want more overlap call from several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from stemma.memory.pool.absent import AbsentKeys
from stemma.memory.pool.backend import Parts
from stemma.memory.pool.envelope import damage
from stemma.memory.pool.guard import Guard
from stemma.memory.pool.keys import PoolKeys
from stemma.memory.pool.registered import RegisteredMemory
from stemma.memory.pool.staging import Staging
from stemma.memory.store import ReadResult
from stemma.types import BlockKey

BATCH_BLOCKS = 64
"""Most blocks of one backend call."""
FAILED_FOR_S = 5.0
ABSENT_FOR_S = 0.5
"""How long the negative cache keeps a key that couldn't be read, or wasn't there."""


_PARALLEL_BYTES = 8 * 2**20
"""From here on it pays to wake a second thread."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One block to read."""

    at: int
    """Its place in the caller's list."""
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
    ) -> None:
        self._guard = guard
        self._names = names
        self._staging = staging
        self._registered = registered
        self._absent = absent
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="stemma-pool-check")

    def read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[ReadResult]:
        """Read each key into its buffer; after a late batch the rest is late, unasked."""
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

    def _read_batch(self, waiting: list[_Wanted]) -> list[ReadResult]:
        """Return results of the first few of `waiting`; of all, if it makes no sense to go on."""
        if not self._guard.admits():
            self._guard.count_reason("circuit_open", len(waiting))
            return [ReadResult.ERROR] * len(waiting)
        batch = waiting[:BATCH_BLOCKS]
        direct = all(self._registered.covers(wanted.into) for wanted in batch)
        give: Callable[[], None]
        parts: list[Parts]
        if direct:
            headers = self._staging.headers.take(len(batch), self._guard.deadline_s)
            give = partial(self._staging.headers.give, headers)
            values = [(header, wanted.into) for header, wanted in zip(headers, batch, strict=False)]
            parts = list(values)
        else:
            slots = self._staging.slots.take(len(batch), self._guard.deadline_s)
            give = partial(self._staging.slots.give, slots)
            values = [(slot.header, slot.payload) for slot in slots]
            parts = [(slot.whole,) for slot in slots]
        if not values:  # all room is held by calls that don't come back
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
            return self._take(batch, values, answer.value, direct=direct)
        finally:
            call.when_over(give)

    def _take(
        self,
        batch: list[_Wanted],
        values: list[tuple[memoryview, memoryview]],
        found: list[ReadResult],
        *,
        direct: bool,
    ) -> list[ReadResult]:
        """Check each value, (header, payload), and copy it to its place; remove what is spoiled."""

        def check(part: slice) -> list[ReadResult]:
            checked = []
            for wanted, (header, payload), result in zip(batch[part], values[part], found[part], strict=True):
                checked.append(self._checked(wanted.name, header, payload, result))
                if checked[-1] is ReadResult.HIT and not direct:
                    # Not a slice assignment: numpy lets other threads run meanwhile.
                    np.copyto(np.frombuffer(wanted.into, np.uint8), np.frombuffer(payload, np.uint8))
            return checked

        # One core doesn't read as fast as memory gives, and no transfer is under way that would be slowed.
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

    def _checked(self, name: str, header: memoryview, payload: memoryview, result: ReadResult) -> ReadResult:
        if result is ReadResult.HIT:
            found = damage(name, header, payload)
            if found is None:
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
