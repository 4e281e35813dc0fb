"""The host tier: one preallocated arena of DRAM, pinned where a CUDA device reads from it.

The arena is allocated once, at the budget, and never grows, so the tier can't exceed it. (The index takes
about 500 bytes per block, under 0.1 % of a block of a real model.) Copies release the GIL. With a codec,
blocks come in whole and are packed where they lie, by a thread that has time; there are addresses for more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch
from typing_extensions import override

from stemma.errors import ConfigError
from stemma.memory.device.block_codec import BlockCodec, unpack
from stemma.memory.device.pinned import host_rows
from stemma.memory.tiers.block_store import BlockPut, PutResult, ReadResult, Storable
from stemma.memory.tiers.slot_room import SlotRoom, num_slots, paged
from stemma.memory.tiers.slotted import SlottedStore
from stemma.memory.tiers.sparse_rows import SparseRows
from stemma.prefix.eviction.policy import EvictionPolicy
from stemma.types import BlockKey, Tier

_READ_S = 0.05
"""Before a block that was being read is looked at again."""


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
        codec: BlockCodec | None = None,
    ) -> None:
        """Allocate ``capacity_bytes // block_bytes`` blocks; ConfigError if that is none.

        `pin_memory` locks the pages for CUDA copies. `clock` returns seconds that never decrease.
        With a `codec`, whoever owns the store calls `pack_next` in a thread.
        """
        num_whole = num_host_blocks(capacity_bytes, block_bytes)
        self._sparse: SparseRows | None = None
        room = None
        if codec is None:
            self._arena = host_rows(num_whole, block_bytes, pin_memory=pin_memory)
            self._capacity_bytes = self._arena.nbytes
        else:
            stride, self._capacity_bytes = paged(block_bytes), capacity_bytes
            num_rows = num_slots(capacity_bytes, stride)
            room = SlotRoom(num_rows, stride, capacity_bytes)
            self._sparse = SparseRows(num_rows, block_bytes)
            self._arena = torch.from_numpy(self._sparse.rows)
        self._bytes = self._arena.numpy()
        super().__init__(block_bytes, len(self._bytes), policy, clock, codec=codec, room=room)
        self._whole: deque[tuple[int, BlockKey]] = deque()
        """Slots and keys of blocks that aren't packed yet, in order of arrival."""
        self._arrived = threading.Condition(self._lock)

    @property
    def reserved_bytes(self) -> int:
        """Upper limit of this process's memory: the arena and its tables."""
        return self._capacity_bytes + super().reserved_bytes

    @property
    def packs(self) -> bool:
        """Whether blocks are kept packed: they can't be borrowed then."""
        return self._codec is not None

    @property
    def memory(self) -> memoryview:
        """The whole arena, for `BlockStore.register` of the stores below."""
        return self._bytes.reshape(-1).data

    def borrow(self, keys: Sequence[BlockKey]) -> list[torch.Tensor | None]:
        """Return a view ([block_bytes] uint8) of each key that is held; it stays valid until `unpin`.

        This saves the copy of `get_many` if the bytes go directly to the device. Counts as a use; each view
        that isn't None is one pin.
        """
        assert not self.packs
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
            self._lengths[slots] = self.block_bytes
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
                self._whole_block(slot),
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
        """Number of blocks that can be put without evicting others."""
        free_slots = self._index.capacity_blocks - self._index.num_taken
        return free_slots if self._room is None else min(free_slots, self._room.num_whole)

    @property
    def num_whole_blocks(self) -> int:
        """Number of blocks that came in and weren't packed yet."""
        return len(self._whole)

    def pack_next(self, timeout_s: float) -> bool:
        """Pack the block that waits longest, or wait for one. False once the store is closed.

        Only the thread that calls this changes blocks in place, and none that somebody reads.
        """
        with self._lock:
            if not self._whole and self._is_open:
                self._arrived.wait(timeout_s)
            if not self._whole or not self._is_open:
                return self._is_open
            slot, key = self._whole.popleft()
            if self._index.find(key) != slot or self._lengths[slot] != self.block_bytes:
                return True
            self._index.pin(key)
            self._num_moving += 1
        assert self._codec is not None
        packed = None
        try:
            packed = self._codec.pack(self._bytes[slot].data)
        finally:
            with self._lock:
                self._index.unpin(key)
                self._replace(slot, key, packed)
                self._moved()
        return True

    def _replace(self, slot: int, key: BlockKey, packed: memoryview | None) -> None:
        """Let a packed block take the place of the whole one, later if that is being read."""
        if packed is None or self._index.find(key) != slot:
            return
        if self._index.is_pinned(slot):
            self._whole.append((slot, key))
            self._arrived.wait(_READ_S)
            return
        self._bytes[slot, : packed.nbytes] = np.frombuffer(packed, np.uint8)
        self._stored_bytes -= self.block_bytes - packed.nbytes
        self._lengths[slot] = packed.nbytes
        assert self._room is not None
        self._discard(slot, self._room.take(slot, packed.nbytes))

    @override
    def _discard(self, slot: int, unused: range) -> None:
        if self._sparse is not None:
            self._sparse.discard(slot, unused)

    @override
    def _commit(self, block: Storable, slot: int, now: float) -> None:
        super()._commit(block, slot, now)
        if self.packs:
            self._whole.append((slot, block.key))
            self._arrived.notify()

    def _whole_block(self, slot: int) -> memoryview:
        """Return the bytes of a pinned slot's block, unpacked if need be."""
        if self._lengths[slot] == self.block_bytes:
            return memoryview(self._bytes[slot])
        block = memoryview(bytearray(self.block_bytes))
        self._unpack(slot, block)
        return block

    def _unpack(self, slot: int, into: memoryview) -> bool:
        return unpack(self._bytes[slot, : self._lengths[slot]].data, into)

    def _free_all(self) -> None:
        self._arrived.notify_all()
        # Borrowed views keep the memory alive until the last view is freed.
        self._arena = torch.empty((0, 0), dtype=torch.uint8)
        self._bytes = np.empty((0, 0), dtype=np.uint8)

    def _read(self, slots: Sequence[int], into: Sequence[memoryview]) -> list[tuple[ReadResult, str]]:
        outcomes = [(ReadResult.HIT, "")] * len(slots)
        for n, (slot, buffer) in enumerate(zip(slots, into, strict=True)):
            if self._lengths[slot] == self.block_bytes:
                np.copyto(np.frombuffer(buffer, dtype=np.uint8), self._bytes[slot])
            elif not self._unpack(slot, buffer):
                outcomes[n] = (ReadResult.CORRUPT, "checksum")
        return outcomes

    @override
    def _write(self, slots: Sequence[int], blocks: Sequence[BlockPut]) -> list[tuple[PutResult, str]]:
        for slot, block in zip(slots, blocks, strict=True):
            np.copyto(self._bytes[slot], np.frombuffer(block.data, dtype=np.uint8))
        self._lengths[slots] = self.block_bytes
        return [(PutResult.STORED, "")] * len(slots)
