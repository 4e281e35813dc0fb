"""Writing blocks to a pool, batch by batch, in the thread of whoever calls.

A block is sealed with a header before it leaves. So a put that a backend finishes after the block's memory
was reused stores a value that fails its check, not a wrong block. Blocks in registered memory aren't copied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from stemma.memory.pool.absent import AbsentKeys
from stemma.memory.pool.backend import Parts
from stemma.memory.pool.envelope import seal
from stemma.memory.pool.guard import Guard
from stemma.memory.pool.keys import PoolKeys
from stemma.memory.pool.reads import BATCH_BLOCKS
from stemma.memory.pool.registered import RegisteredMemory
from stemma.memory.pool.staging import Slot, Staging
from stemma.memory.store import BlockPut, PutResult
from stemma.types import BlockKey

_NUM_RETRIES = 3
_RETRY_AFTER_S = 0.01


@dataclass(frozen=True, slots=True)
class _Write:
    """One sealed block."""

    key: BlockKey
    name: str
    parts: Parts
    slot: Slot


class Writer:
    """Writes blocks through a guard."""

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

    def write(self, blocks: Sequence[BlockPut]) -> list[PutResult]:
        """Store blocks, batch by batch; after the first late batch the rest fails untried."""
        results: list[PutResult] = []
        while len(results) < len(blocks):
            rest = blocks[len(results) :]
            slots = self._staging.take(min(BATCH_BLOCKS, len(rest)), self._guard.deadline_s)
            if not slots:
                self._guard.count_reason("no_slot", len(rest))
                return results + [PutResult.DROPPED] * len(rest)
            batch = [self._sealed(block, slot) for block, slot in zip(rest, slots, strict=False)]
            stored, late = self._store(batch)
            results += stored
            if late:
                return results + [PutResult.ERROR] * (len(blocks) - len(results))
        return results

    def _sealed(self, block: BlockPut, slot: Slot) -> _Write:
        name = self._names.own(block.key)
        if self._registered.covers(block.data):
            seal(name, block.data, slot.header)
            return _Write(block.key, name, (slot.header, block.data), slot)
        np.copyto(np.frombuffer(slot.payload, np.uint8), np.frombuffer(block.data, np.uint8))
        seal(name, slot.payload, slot.header)
        return _Write(block.key, name, (slot.whole,), slot)

    def _store(self, batch: list[_Write]) -> tuple[list[PutResult], bool]:
        """Put one batch and give its slots back; return the results, and whether it was late.

        Blocks for which there was no space are tried again: Mooncake evicts in the background.
        """
        results = [PutResult.ERROR] * len(batch)
        waiting = list(range(len(batch)))
        for attempt in range(_NUM_RETRIES + 1):
            if attempt:
                time.sleep(_RETRY_AFTER_S)
            if not self._guard.admits():
                self._guard.count_reason("circuit_open", len(waiting))
                break
            some = [batch[at] for at in waiting]
            call = self._guard.start(
                self._guard.backend.put_many, [write.name for write in some], [write.parts for write in some]
            )
            answer = self._guard.finish(call, len(some))
            if answer.value is None:
                call.when_over(partial(self._staging.give, [write.slot for write in batch]))
                return results, answer.late
            for at, result in zip(waiting, answer.value, strict=True):
                results[at] = result
                if result in (PutResult.STORED, PutResult.EXISTS):
                    self._absent.discard(batch[at].key)
            waiting = [at for at in waiting if results[at] is PutResult.NO_SPACE]
            if not waiting:
                break
        self._guard.count_reason("no_space", results.count(PutResult.NO_SPACE))
        self._staging.give([write.slot for write in batch])
        return results, False
