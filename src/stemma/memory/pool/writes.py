"""Writing blocks to a pool, at once or through a queue that is bounded in bytes.

A cache may forget, it may not stall: when the queue is full the newest blocks are dropped and counted. A
block is sealed with a header before it leaves, so a put that a backend finishes after its memory was reused
stores a value that fails its check, not a wrong block.
"""

from __future__ import annotations

import queue
import threading
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
    """Writes blocks through a guard, in the caller's thread."""

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
            batch = [self.prepare(block, slot) for block, slot in zip(rest, slots, strict=False)]
            stored, late = self.store(batch)
            results += stored
            if late:
                return results + [PutResult.ERROR] * (len(blocks) - len(results))
        return results

    def prepare(self, block: BlockPut, slot: Slot, *, copy: bool = False) -> _Write:
        """Seal a block; copy it into `slot` unless it lies in registered memory and may stay there."""
        name = self._names.own(block.key)
        if not copy and self._registered.covers(block.data):
            seal(name, block.data, slot.header)
            return _Write(block.key, name, (slot.header, block.data), slot)
        np.copyto(np.frombuffer(slot.payload, np.uint8), np.frombuffer(block.data, np.uint8))
        seal(name, slot.payload, slot.header)
        return _Write(block.key, name, (slot.whole,), slot)

    def store(self, batch: list[_Write]) -> tuple[list[PutResult], bool]:
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


class WriteQueue:
    """Takes blocks over in microseconds and writes them from a thread of its own."""

    def __init__(self, writer: Writer, guard: Guard, staging: Staging, block_bytes: int) -> None:
        self._writer = writer
        self._guard = guard
        self._staging = staging
        self._block_bytes = block_bytes
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._queued: set[BlockKey] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="pool-writes", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes of blocks taken over and not yet written."""
        return len(self._queued) * self._block_bytes

    def write(self, blocks: Sequence[BlockPut]) -> list[PutResult]:
        """Copy blocks and return QUEUED for each, or DROPPED where the queue is full or has it already."""
        return [self._take_over(block) for block in blocks]

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything taken over so far is written or has failed; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued, timeout_s)

    def close(self) -> None:
        """Drop what is queued and stop."""
        self._closed = True
        self._queue.put(None)

    def _take_over(self, block: BlockPut) -> PutResult:
        with self._changed:
            if block.key in self._queued:
                self._guard.count_reason("already_queued")
                return PutResult.DROPPED
            slots = self._staging.take(1, 0.0)
            if not slots:
                self._guard.count_reason("queue_full")
                return PutResult.DROPPED
            self._queued.add(block.key)
        self._queue.put(self._writer.prepare(block, slots[0], copy=True))
        return PutResult.QUEUED

    def _work(self) -> None:
        while True:
            batch: list[_Write] = []
            first = self._queue.get()
            if first is None or self._closed:
                return
            batch.append(first)
            while len(batch) < BATCH_BLOCKS and not self._queue.empty():
                more = self._queue.get()
                if more is None:
                    return
                batch.append(more)
            results, _ = self._writer.store(batch)
            self._guard.count_puts(results, self._block_bytes)
            with self._changed:
                self._queued.difference_update(write.key for write in batch)
                self._changed.notify_all()
