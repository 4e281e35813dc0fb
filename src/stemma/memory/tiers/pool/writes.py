"""Writes blocks to a pool, batch by batch, in the caller's thread.

A block is packed, if there is a codec, and sealed with a header before it is sent. So a put that ends after
the block's memory was reused stores a value that fails its check, not a wrong block. Without a codec, blocks
in registered memory aren't copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from stemma.memory.device.block_codec import BlockCodec
from stemma.memory.tiers.block_store import BlockPut, PutResult
from stemma.memory.tiers.device_block import BlockNotes
from stemma.memory.tiers.pool.absent import AbsentKeys
from stemma.memory.tiers.pool.backend import Parts
from stemma.memory.tiers.pool.envelope import HEADER_BYTES, seal
from stemma.memory.tiers.pool.guard import Guard
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.reads import BATCH_BLOCKS
from stemma.memory.tiers.pool.registered import RegisteredMemory
from stemma.memory.tiers.pool.value_staging import Staging
from stemma.types import BlockKey

_NUM_RETRIES = 3
_RETRY_AFTER_S = 0.01


@dataclass(frozen=True, slots=True)
class _Write:
    """One sealed block."""

    key: BlockKey
    name: str
    parts: Parts


class Writer:
    """Writes blocks through a guard."""

    def __init__(
        self,
        guard: Guard,
        names: PoolKeys,
        staging: Staging,
        registered: RegisteredMemory,
        absent: AbsentKeys,
        codec: BlockCodec | None,
    ) -> None:
        self._codec = codec
        self._guard = guard
        self._names = names
        self._staging = staging
        self._registered = registered
        self._absent = absent

    def write(self, blocks: Sequence[BlockPut]) -> list[PutResult]:
        """Store blocks, batch by batch; after the first late batch the rest fails without a try."""
        results: list[PutResult] = []
        while len(results) < len(blocks):
            rest = blocks[len(results) :]
            batch, free = self._sealed(rest[:BATCH_BLOCKS])
            if not batch:
                self._guard.count_reason("no_slot", len(rest))
                return results + [PutResult.DROPPED] * len(rest)
            stored, late = self._store(batch, free)
            results += stored
            if late:
                return results + [PutResult.ERROR] * (len(blocks) - len(results))
        return results

    def _sealed(self, blocks: Sequence[BlockPut]) -> tuple[list[_Write], Callable[[], None]]:
        """Seal the first few of `blocks`, or none; also return the function that frees their slots."""
        names = [self._names.own(block.key) for block in blocks]
        batch: list[_Write] = []
        if self._codec is None and all(self._registered.covers(block.data) for block in blocks):
            headers = self._staging.headers.take(len(blocks), self._guard.deadline_s)
            for block, name, header in zip(blocks, names, headers, strict=False):
                seal(name, block.data, header, BlockNotes(block.hint, block.session))
                batch.append(_Write(block.key, name, (header, block.data)))
            return batch, partial(self._staging.headers.free, headers)
        slots = self._staging.slots.take(len(blocks), self._guard.deadline_s)
        for block, name, slot in zip(blocks, names, slots, strict=False):
            data = (self._codec and self._codec.pack(block.data)) or block.data
            payload = slot.payload[: data.nbytes]
            np.copyto(np.frombuffer(payload, np.uint8), np.frombuffer(data, np.uint8))
            seal(name, payload, slot.header, BlockNotes(block.hint, block.session))
            batch.append(_Write(block.key, name, (slot.whole[: HEADER_BYTES + data.nbytes],)))
        return batch, partial(self._staging.slots.free, slots)

    def _store(self, batch: list[_Write], free: Callable[[], None]) -> tuple[list[PutResult], bool]:
        """Put one batch and free its slots; return the results, and whether it was late.

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
                call.add_done_callback(lambda _: free())
                return results, answer.late
            for at, result in zip(waiting, answer.value, strict=True):
                results[at] = result
                if result in (PutResult.STORED, PutResult.EXISTS):
                    self._absent.discard(batch[at].key)
            waiting = [at for at in waiting if results[at] is PutResult.NO_SPACE]
            if not waiting:
                break
        self._guard.count_reason("no_space", results.count(PutResult.NO_SPACE))
        free()
        return results, False
