"""Reading blocks from a pool: in batches, the next one under way while this one is checked and copied.

A block is read into a staging slot and copied out once its header proves it. So a read that comes late
writes into a slot that nobody uses any more, and never into memory that its caller has given to something
else. Where the destination lies in registered memory it is read in place; such a call is waited for to its
very end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from stemma.memory.pool.absent import AbsentKeys
from stemma.memory.pool.backend import Parts
from stemma.memory.pool.calls import Call
from stemma.memory.pool.envelope import damage
from stemma.memory.pool.guard import Guard
from stemma.memory.pool.keys import PoolKeys
from stemma.memory.pool.registered import RegisteredMemory
from stemma.memory.pool.staging import Slot, Staging
from stemma.memory.store import ReadResult
from stemma.types import BlockKey

BATCH_BLOCKS = 16
"""Blocks a backend call; where Mooncake's bandwidth over TCP levels off."""
_NUM_IN_FLIGHT = 2
_FAILED_FOR_S = 5.0
_ABSENT_FOR_S = 0.5


@dataclass(slots=True)
class _Batch:
    """One backend call of `read`."""

    positions: list[int]
    """Which of the caller's keys."""
    names: list[str]
    slots: list[Slot]
    direct: bool
    """Whether the payloads go straight to the caller's buffers."""
    call: Call[list[ReadResult]]


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

    def read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[ReadResult]:
        """Read each key into its buffer; after the first late batch the rest is late unasked."""
        results = [ReadResult.MISS] * len(keys)
        waiting = [at for at, key in enumerate(keys) if key not in self._absent]
        self._guard.count_reason("negative_cache", len(keys) - len(waiting))
        in_flight: deque[_Batch] = deque()
        verdict: ReadResult | None = None
        while waiting or in_flight:
            if waiting and verdict is None and not self._guard.admits():
                verdict = ReadResult.ERROR
                self._guard.count_reason("circuit_open", len(waiting))
            if verdict is not None:
                for at in waiting:
                    results[at] = verdict
                waiting = []
            elif waiting and len(in_flight) < _NUM_IN_FLIGHT:
                batch = self._start(waiting, keys, into, may_wait=not in_flight)
                if batch is not None:
                    in_flight.append(batch)
                    waiting = waiting[len(batch.positions) :]
                    continue
                if not in_flight:  # every slot is held by calls that don't come back
                    verdict = ReadResult.LATE
                    self._guard.count_reason("no_slot", len(waiting))
                    continue
            if in_flight and self._finish(in_flight.popleft(), keys, into, results):
                verdict = verdict or ReadResult.LATE
        return results

    def _start(
        self, waiting: list[int], keys: Sequence[BlockKey], into: Sequence[memoryview], *, may_wait: bool
    ) -> _Batch | None:
        slots = self._staging.take(
            min(BATCH_BLOCKS, len(waiting)), self._guard.deadline_s if may_wait else 0.0
        )
        if not slots:
            return None
        positions = waiting[: len(slots)]
        names = [self._names.own(keys[at]) for at in positions]
        direct = all(self._registered.covers(into[at]) for at in positions)
        parts: list[Parts] = [
            (slot.header, into[at]) if direct else (slot.whole,)
            for at, slot in zip(positions, slots, strict=True)
        ]
        call = self._guard.start(self._guard.backend.get_many, names, parts)
        return _Batch(positions, names, slots, direct, call)

    def _finish(
        self,
        batch: _Batch,
        keys: Sequence[BlockKey],
        into: Sequence[memoryview],
        results: list[ReadResult],
    ) -> bool:
        """Fill in the results of a batch; return whether it was late."""
        answer = self._guard.finish(batch.call, len(batch.positions), settle=batch.direct)
        batch_failed = ReadResult.LATE if answer.late else ReadResult.ERROR
        found = answer.value or [batch_failed] * len(batch.positions)
        spoiled: list[str] = []
        for at, name, slot, result in zip(batch.positions, batch.names, batch.slots, found, strict=True):
            payload = into[at] if batch.direct else slot.payload
            if answer.value is None:
                results[at] = result
                continue
            results[at] = self._checked(name, slot.header, payload, result)
            if results[at] is ReadResult.CORRUPT:
                spoiled.append(name)
            elif results[at] is ReadResult.HIT and not batch.direct:
                # Not a slice assignment: numpy lets other threads run meanwhile.
                np.copyto(np.frombuffer(into[at], np.uint8), np.frombuffer(slot.payload, np.uint8))
            self._remember(keys[at], results[at])
        batch.call.when_over(partial(self._staging.give, batch.slots))
        if spoiled:
            self._guard.remove(spoiled)
        return answer.late

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
        return result

    def _remember(self, key: BlockKey, result: ReadResult) -> None:
        if result in (ReadResult.MISS, ReadResult.CORRUPT):
            self._absent.add(key, _ABSENT_FOR_S)
        elif result is ReadResult.ERROR:
            self._absent.add(key, _FAILED_FOR_S)
