"""Reads a run of blocks from a slow store chunk by chunk; successive chunks use different memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stemma.memory.tiers.block_store import BlockStore, ReadResult
from stemma.memory.tiers.staging import StagingArena
from stemma.types import BlockKey

CHUNK_BLOCKS = 16
_BUFFER_BYTES = 64 * 2**20
"""Memory for two chunks: one is read while the other is copied."""


def num_buffers(block_bytes: int) -> int:
    """Return how many blocks one reader's buffers hold."""
    return max(2, min(2 * CHUNK_BLOCKS, _BUFFER_BYTES // block_bytes))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks that were read. They may be used between `prove` and `free`, each of which is called once."""

    num_keys: int
    places: Sequence[memoryview]
    """Buffers of the blocks; those that aren't hits are undefined or missing."""
    prove: Callable[[], list[ReadResult]]
    """Return one result per key."""
    free: Callable[[], None]


class ChunkReader:
    """Reads chunks for one worker thread. A chunk's memory is reused two chunks later.

    A store that lends its own memory chooses the chunk size. A pool lends memory: its backend is fastest with
    large batches into registered memory, and a late transfer keeps that memory until it ends.
    """

    def __init__(self, block_bytes: int, *, pin_memory: bool) -> None:
        self._block_bytes = block_bytes
        self._pin_memory = pin_memory
        self._buffers: StagingArena | None = None
        self._is_second_half = False

    def read(self, store: BlockStore, keys: Sequence[BlockKey]) -> Chunk:
        """Read the first few keys."""
        loan = store.lend_many(keys)
        if loan is not None:
            return Chunk(len(loan.results), loan.places, lambda: loan.results, loan.free)
        if self._buffers is None:  # not allocated while all stores lend their own memory
            num_slots = num_buffers(self._block_bytes)
            self._buffers = StagingArena(num_slots, self._block_bytes, pin_memory=self._pin_memory)
        half = self._buffers.num_slots // 2
        first = half if self._is_second_half else 0
        self._is_second_half = not self._is_second_half
        places = [self._buffers.view(first + n) for n in range(min(half, len(keys)))]
        return Chunk(len(places), places, store.fetch_many(keys[:half], places), lambda: None)
