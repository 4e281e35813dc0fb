"""The host tier: one preallocated arena of DRAM, pinned where a CUDA device reads from it.

The arena is allocated once, at the budget, and never grows, so the tier can't exceed it. (The index takes
about 500 bytes per block, under 0.1 % of a block of a real model.) Copies release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch

from stemma.errors import ConfigError
from stemma.memory.device.pinned import host_rows
from stemma.memory.tiers.block_store import BlockPut, PutResult, ReadResult, Storable
from stemma.memory.tiers.slotted import SlottedStore
from stemma.prefix.eviction.policy import EvictionPolicy
from stemma.types import BlockKey, Tier


def num_host_blocks(capacity_bytes: int, block_bytes: int) -> int:
    """Return how many blocks fit; raise ConfigError if none does."""
    if capacity_bytes < block_bytes:
        raise ConfigError(f"host cache of {capacity_bytes} bytes can't hold one block of {block_bytes}")
    return capacity_bytes // block_bytes


class HostStore(SlottedStore):
    """Blocks in DRAM."""

    tier: ClassVar[Tier] = Tier.HOST

    def __init__(
        self,
        block_bytes: int,
        capacity_bytes: int,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        *,
        pin_memory: bool = False,
    ) -> None:
        """Allocate ``capacity_bytes // block_bytes`` blocks; ConfigError if that is none.

        `pin_memory` locks the pages for CUDA copies. `clock` returns seconds that never decrease.
        """
        num_slots = num_host_blocks(capacity_bytes, block_bytes)
        super().__init__(block_bytes, num_slots, policy, clock)
        self._arena = host_rows(num_slots, block_bytes, pin_memory=pin_memory)
        self._bytes = self._arena.numpy()

    @property
    def reserved_bytes(self) -> int:
        """Upper limit of this process's memory: the arena and its tables."""
        return self._bytes.nbytes + super().reserved_bytes

    @property
    def memory(self) -> memoryview:
        """The whole arena, for `BlockStore.register` of the stores below."""
        return self._bytes.reshape(-1).data

    def borrow(self, keys: Sequence[BlockKey]) -> list[torch.Tensor | None]:
        """Return a view ([block_bytes] uint8) of each key that is held; it stays valid until `unpin`.

        This saves the copy of `get_many` if the bytes go directly to the device. Counts as a use; each view
        that isn't None is one pin.
        """
        with self._lock:
            slots = self._acquire(keys)
            num_hits = len(slots) - slots.count(None)
            self.counters.reads[ReadResult.HIT] += num_hits
            self.counters.reads[ReadResult.MISS] += len(slots) - num_hits
            self.counters.read_bytes += num_hits * self.block_bytes
            return [None if slot is None else self._arena[slot] for slot in slots]

    def put_from(
        self, blocks: Sequence[Storable], copy: Callable[[Sequence[int], Sequence[torch.Tensor]], None]
    ) -> list[PutResult]:
        """Store blocks from other memory, for instance a device, with a single copy.

        ``copy(positions, slots)`` must fill each slot ([block_bytes] uint8, pinned if the arena is) with the
        bytes of ``blocks[position]`` before it returns.
        """

        def write(slots: Sequence[int], at: Sequence[int]) -> list[tuple[PutResult, str]]:
            copy(at, [self._arena[slot] for slot in slots])
            return [(PutResult.STORED, "")] * len(slots)

        return self._put(blocks, write)

    def drop_oldest(self, num_blocks: int, save: Callable[[Sequence[BlockPut]], None]) -> int:
        """Make room ahead of need: pass the next victims to `save`, but for expired ones, then drop them.

        They stay readable until `save` returns. A block that was used or got a child in the meantime isn't
        dropped. Duplicates go before all others, without being saved. Returns how many were dropped.
        """
        with self._lock:
            self._check_open()
            if num_dropped := self._drop_duplicates(num_blocks):
                return num_dropped
            used_at, now = self._used_at, self._ranked_at(self._now())
            taken = self._index.take_victims(
                num_blocks,
                now,
                lambda leaf, above: bool(used_at[above] <= used_at[leaf] + 1.0),
            )
            stamps = [float(self._used_at[slot]) for slot, _, _ in taken]
            self._num_moving += 1
        blocks = [
            BlockPut(
                key,
                parent,
                memoryview(self._bytes[slot]),
                self._hints[slot],
                self._index.owner_of(slot),
                self._sessions.item(slot),
            )
            for slot, key, parent in taken
            if not self._is_expired(slot, self._latest)
        ]
        try:
            save(blocks)
        finally:
            with self._lock:
                self._moved()
                for _, key, _ in taken:
                    self._index.unpin(key)
                num_dropped = 0
                for (slot, _, _), stamp in zip(taken, stamps, strict=True):
                    if self._index.is_leaf(slot) and used_at[slot] == stamp:
                        num_dropped += self._drop([slot])
                self.counters.num_evicted += num_dropped
        return num_dropped

    def mark_duplicates(self, keys: Iterable[BlockKey]) -> None:
        """Note that the device holds these keys too: their copies here are evicted before all others.

        Who says so must put the block again when it leaves the device.
        """
        with self._lock:
            self._index.mark_duplicates(keys)

    def unmark_duplicates(self, keys: Iterable[BlockKey]) -> None:
        """Note that the device doesn't hold these keys any more."""
        with self._lock:
            self._index.unmark_duplicates(keys)

    @property
    def num_duplicates(self) -> int:
        """Number of blocks that the device holds too."""
        return self._index.num_duplicates

    def _drop_duplicates(self, num_blocks: int) -> int:
        """Evict up to `num_blocks` duplicates; return how many. Called with the lock."""
        for number in range(num_blocks):
            slot = self._index.evict_duplicate(self._ranked_at(self._now()))
            if slot is None:
                return number
            self._evicted(slot)
        return num_blocks

    @property
    def num_free(self) -> int:
        """Number of slots that a put can take without evicting."""
        return self.capacity_blocks - self._index.num_taken

    def _free_all(self) -> None:
        # Borrowed views keep the memory alive until the last view is freed.
        self._arena = torch.empty((0, 0), dtype=torch.uint8)
        self._bytes = np.empty((0, 0), dtype=np.uint8)

    def _read(self, slots: Sequence[int], into: Sequence[memoryview]) -> list[tuple[ReadResult, str]]:
        for slot, buffer in zip(slots, into, strict=True):
            np.copyto(np.frombuffer(buffer, dtype=np.uint8), self._bytes[slot])
        return [(ReadResult.HIT, "")] * len(slots)

    def _write(self, slots: Sequence[int], blocks: Sequence[BlockPut]) -> list[tuple[PutResult, str]]:
        for slot, block in zip(slots, blocks, strict=True):
            np.copyto(self._bytes[slot], np.frombuffer(block.data, dtype=np.uint8))
        return [(PutResult.STORED, "")] * len(slots)
