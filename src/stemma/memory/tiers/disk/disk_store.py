"""The disk tier's store: blocks in slots of slab files.

A write stores the block with its record in the slab, then the record in the index file. Nothing is synced.
A read compares the bytes with the checksum in the record, which is bound to key and generation. So a torn,
stale, truncated or bit-flipped block is a counted miss, whatever a crash left behind, and its slot is freed.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from stemma.errors import ConfigError, StorageError
from stemma.memory.device.block_codec import BlockCodec, expand
from stemma.memory.tiers.block_store import BlockPut, PutResult, ReadResult, Storable
from stemma.memory.tiers.disk.files import FileLayer
from stemma.memory.tiers.disk.record import (
    MAX_BLOCK_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    Record,
    block_checksum,
    hints_in,
    owners_in,
    sound_records,
    with_hint,
    with_last_use,
)
from stemma.memory.tiers.disk.restored import restored_blocks
from stemma.memory.tiers.disk.slabs import SlabFiles
from stemma.memory.tiers.disk.spaces import (
    READ_ONLY_ERRNOS,
    Manifest,
    new_manifest,
    open_space,
)
from stemma.memory.tiers.slot_room import SlotRoom, num_slots
from stemma.memory.tiers.slotted import SlottedStore
from stemma.prefix.eviction.policy import BlockTraits, EvictionPolicy
from stemma.prefix.keys import KeySpace
from stemma.types import BlockKey, Tier

NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BACK_OFF_S = 30.0
"""Seconds without a new try after a failed write or growth: each try may cost a good block."""

_SMALL_FILES_BYTES = 65536
"""Set aside for manifest and lock."""
_PARALLEL_BYTES = 4 * 2**20
"""Of packed blocks, from which a second thread is worth waking."""
_RUN_BYTES = 16 * 2**20
"""Maximum bytes of adjacent blocks read in one call."""


def capacity_of(space: KeySpace, block_bytes: int, size_bytes: int, *, packs: bool = False) -> int:
    """Return how many blocks fit a directory limited to `size_bytes`; with `packs`, how many slots it has."""
    slot_bytes = new_manifest(space, block_bytes, size_bytes).slot_bytes
    budget = max(0, size_bytes - _SMALL_FILES_BYTES)
    return num_slots(budget, slot_bytes, RECORD_BYTES) if packs else budget // (slot_bytes + RECORD_BYTES)


def num_disk_blocks(space: KeySpace, block_bytes: int, size_bytes: int) -> int:
    """Return the same; raise ConfigError if none does."""
    if block_bytes > MAX_BLOCK_BYTES:
        raise ConfigError(f"a block on disk has up to {MAX_BLOCK_BYTES} bytes, not {block_bytes}")
    num_blocks = capacity_of(space, block_bytes, size_bytes)
    if num_blocks < 1:
        raise ConfigError(f"disk cache of {size_bytes} bytes can't hold one block of {block_bytes}")
    return num_blocks


def size_for_blocks(manifest: Manifest, num_blocks: int) -> int:
    """Return the size limit that a sub-directory needs to hold `num_blocks`."""
    return _SMALL_FILES_BYTES + num_blocks * (manifest.slot_bytes + RECORD_BYTES)


class DiskStore(SlottedStore):
    """Blocks on a local disk, kept across restarts."""

    tier: ClassVar[Tier] = Tier.DISK

    def __init__(
        self,
        root: Path,
        space: KeySpace,
        block_bytes: int,
        size_bytes: int,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        *,
        default_ttl_s: float | None = None,
        files: FileLayer | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        codec: BlockCodec | None = None,
    ) -> None:
        """Open the sub-directory of `space` under `root` and find what it holds.

        `size_bytes` limits all files under `root`. `clock` returns seconds since 1970, because times outlive
        the process; `monotonic` measures the wait after a failed write. `codec` packs what is written; what
        was is read with or without. Raises ConfigError if no block fits, and what `open_space` raises.
        """
        wanted = new_manifest(space, block_bytes, size_bytes)
        capacity_blocks = num_disk_blocks(space, block_bytes, size_bytes)
        room = None
        if codec is not None:
            capacity_blocks = capacity_of(space, block_bytes, size_bytes, packs=True)
            budget = size_bytes - _SMALL_FILES_BYTES - capacity_blocks * RECORD_BYTES
            room = SlotRoom(capacity_blocks, wanted.slot_bytes, budget, head_bytes=RECORD_BYTES)
        super().__init__(
            block_bytes, capacity_blocks, policy, clock, default_ttl_s=default_ttl_s, codec=codec, room=room
        )
        self._size_bytes = size_bytes
        self._files = files or FileLayer()
        self._space = open_space(root, wanted)
        self._manifest: Manifest = self._space.manifest
        self._slabs = SlabFiles(self._files, self._space, capacity_blocks, room)
        self._table = bytearray(RECORD_BYTES * capacity_blocks)
        """Intended content of the index file, by slot."""
        self._generation = 0
        self._monotonic = monotonic
        self._refused_until = -np.inf
        self._no_growth_until = -np.inf
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="stemma-disk-unpack")
        self._growing = threading.Lock()
        """Held while a slab is added, which may take seconds; the store's own lock isn't held then."""
        self._padding = bytes(self._manifest.slot_bytes - RECORD_BYTES - block_bytes)
        self._between = memoryview(bytearray(self._manifest.slot_bytes - block_bytes))
        """Receives the bytes between two adjacent blocks that are read in one call; never used."""
        try:
            self._slabs.open()
            self._restore()
        except OSError as error:
            self._slabs.close()
            self._space.free()
            raise StorageError(f"can't open the disk cache {self.path}: {error.strerror}") from error

    @property
    def reserved_bytes(self) -> int:
        """Upper limit of this process's memory: a copy of the index file, and tables."""
        return len(self._table) + super().reserved_bytes

    @property
    def path(self) -> Path:
        """The sub-directory of this model."""
        return self._space.path

    @property
    def read_only(self) -> bool:
        """Whether the file system refused writes when the store was opened."""
        return self._space.read_only

    def sync(self) -> None:
        """Write the times of last use into the index file, so that a restart knows the order of use."""
        with self._lock:
            self._check_open()
            self._write_last_uses()

    def clear(self) -> int:
        """Drop every unpinned block; if none is left, the slabs are deleted, which frees their disk space."""
        with self._lock:
            self._check_open()
            count = self._drop(self._index.unpinned())
            if self._num_moving == 0 and self._index.rewind():
                try:
                    self._slabs.shrink_to_nothing()
                    self._no_growth_until = -np.inf
                    if self._room is not None:
                        self._room.forget()
                except OSError as error:
                    self.counters.reasons[_reason(error)] += 1
            return count

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, int]:
        """Read every block and drop those that fail; return counts by reason, ``ok`` for the good ones.

        `progress` is told the blocks read so far, and all.
        """
        with self._lock:
            self._check_open()
            live = [(slot, key) for slot, key, _ in self._index.live()]
        outcomes: Counter[str] = Counter(ok=0)
        buffer = memoryview(bytearray(self.block_bytes))
        for number, (slot, key) in enumerate(live):
            progress(number, len(live))
            outcomes[self._verify_one(slot, key, buffer)] += 1
        return dict(outcomes)

    def _verify_one(self, slot: int, key: BlockKey, buffer: memoryview) -> str:
        """Read one block without counting it as used; drop it if it fails."""
        with self._lock:
            if self._index.find(key) != slot:
                return "gone"
            self._index.pin(key)
            self._num_moving += 1
        try:
            ((result, reason),) = self._prove([slot], [key], [buffer], self._read([slot], [buffer]))
        except BaseException:
            self._end_read([key])
            raise
        with self._lock:
            self._moved()
            self._index.unpin(key)
            if result is not ReadResult.HIT and self._index.find(key) == slot:
                self._drop([slot])
        return reason or "ok"

    def check(self) -> None:
        """Prove the invariants of the tables, and that files stay within the limit (slow)."""
        super().check()
        with self._lock:
            assert self._slabs.num_slots >= self._index.num_opened

    # -- moving bytes ------------------------------------------------------------------------------

    def _read(self, slots: Sequence[int], into: Sequence[memoryview]) -> list[tuple[ReadResult, str]]:
        """Read adjacent blocks in one call; HIT means only that the bytes were read."""
        outcomes: list[tuple[ReadResult, str]] = []
        runs = self._runs(slots)
        for n, run in enumerate(runs):
            # The kernel's own readahead covers adjacent runs better than a hint.
            if n + 1 < len(runs) and slots[runs[n + 1].start] != slots[run.stop - 1] + 1:
                fd, offset = self._slabs.place(slots[runs[n + 1].start])
                self._files.will_read(fd, offset, self._manifest.slot_bytes)
            outcomes += self._read_run(slots[run], into[run])
        return outcomes

    def _runs(self, slots: Sequence[int]) -> list[slice]:
        """Split `slots` into what is read in one call: a packed block alone, as a hole is behind it."""
        if (self._lengths[slots] < self.block_bytes).any():
            return [slice(n, n + 1) for n in range(len(slots))]
        return self._slabs.runs(slots, _RUN_BYTES)

    def _read_run(self, slots: Sequence[int], into: Sequence[memoryview]) -> list[tuple[ReadResult, str]]:
        fd, offset = self._slabs.place(slots[0])
        stride = self._manifest.slot_bytes
        length = self._lengths.item(slots[0])
        views = [into[0][:length]]
        for buffer in into[1:]:
            views += [self._between, buffer]
        try:
            count = self._files.read(fd, views, offset + RECORD_BYTES)
        except OSError as error:
            if len(slots) == 1:
                return [(ReadResult.ERROR, _reason(error))]
            # A bad sector must not fail adjacent blocks.
            singles = zip(slots, into, strict=True)
            return [got for slot, buffer in singles for got in self._read_run([slot], [buffer])]
        return [
            (ReadResult.HIT, "") if n * stride + length <= count else (ReadResult.CORRUPT, "truncated")
            for n in range(len(slots))
        ]

    def _prove(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        read: Sequence[memoryview],
        outcomes: Sequence[tuple[ReadResult, str]],
    ) -> list[tuple[ReadResult, str]]:
        """Turn a HIT whose bytes fail their checksum into CORRUPT."""
        packed_bytes = int(self._lengths[slots][self._lengths[slots] < self.block_bytes].sum())
        half = len(slots) // 2 if packed_bytes >= _PARALLEL_BYTES else 0
        if half == 0:
            return self._prove_each(slots, keys, read, outcomes)
        first = self._helper.submit(self._prove_each, slots[:half], keys[:half], read[:half], outcomes[:half])
        rest = self._prove_each(slots[half:], keys[half:], read[half:], outcomes[half:])
        return [*first.result(), *rest]

    def _prove_each(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        read: Sequence[memoryview],
        outcomes: Sequence[tuple[ReadResult, str]],
    ) -> list[tuple[ReadResult, str]]:
        proven = []
        for slot, key, buffer, outcome in zip(slots, keys, read, outcomes, strict=True):
            record = np.frombuffer(self._table, RECORD_DTYPE, count=1, offset=slot * RECORD_BYTES)[0]
            expected, generation = int(record["checksum"]), int(record["generation"])
            length = int(record["length"])
            is_sound = outcome[0] is not ReadResult.HIT or (
                block_checksum(key, generation, buffer[:length]) == expected
                and (length == self.block_bytes or expand(buffer, length))
            )
            proven.append(outcome if is_sound else (ReadResult.CORRUPT, "checksum"))
        return proven

    def _write(self, slots: Sequence[int], blocks: Sequence[BlockPut]) -> list[tuple[PutResult, str]]:
        return [self._write_one(slot, block) for slot, block in zip(slots, blocks, strict=True)]

    def _write_one(self, slot: int, block: BlockPut) -> tuple[PutResult, str]:
        with self._lock:
            self._generation += 1
            generation = self._generation
            now = self._now()
        packed = None if self._codec is None else self._codec.pack(block.data)
        data, padding = (block.data, self._padding) if packed is None else (packed, b"")
        checksum = block_checksum(block.key, generation, data)
        record = Record(
            slot=slot,
            key=block.key,
            parent=block.parent,
            generation=generation,
            checksum=checksum,
            length=data.nbytes,
            owner=block.owner,
            used_at=now,
            hint=block.hint,
            session=block.session,
        ).pack()
        fd, offset = self._slabs.place(slot)
        try:
            self._files.write(fd, [record, data, padding], offset)
            self._slabs.write_index(slot, record)
        except OSError as error:
            return self._write_failed(error)
        self._lengths[slot] = data.nbytes
        self._table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record
        return PutResult.STORED, ""

    def _write_failed(self, error: OSError) -> tuple[PutResult, str]:
        with self._lock:
            self._refused_until = self._monotonic() + BACK_OFF_S
        result = PutResult.NO_SPACE if error.errno in NO_SPACE_ERRNOS else PutResult.ERROR
        return result, _reason(error)

    # -- hooks of SlottedStore, called with the lock -------------------------------------------------

    def _refusal(self) -> str | None:
        if self.read_only:
            return "read_only"
        return "backing_off" if self._monotonic() < self._refused_until else None

    def _reserve(self) -> int | None:
        return self._index.reserve(self._slabs.num_slots)

    @override
    def _discard(self, slot: int, unused: range) -> None:
        if self.read_only or not unused:
            return
        try:
            self._slabs.discard(slot, unused)
        except OSError as error:  # a file system without holes
            self.counters.reasons[_reason(error)] += 1

    def _dropped(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = bytes(RECORD_BYTES)
            if self.read_only:
                continue
            try:
                self._slabs.write_index(slot, bytes(RECORD_BYTES))
            except OSError as error:
                self.counters.reasons[_reason(error)] += 1

    # -- files ------------------------------------------------------------------------------------

    def _prepare(self, blocks: Sequence[Storable]) -> None:
        """Add slabs until there is a slot for each new block, as far as the limit and the disk allow.

        The store's lock isn't held, so that reads and pins don't wait for the file system.
        """
        with self._growing:
            while self._begin_growth(blocks):
                has_grown, reason = False, None
                try:
                    has_grown = self._slabs.add_slab(self._size_bytes)
                except OSError as error:
                    reason = _reason(error)
                except StorageError:  # the directory can't be listed
                    reason = "unlistable"
                finally:
                    with self._lock:
                        self._moved()
                        if not has_grown:
                            self._no_growth_until = self._monotonic() + BACK_OFF_S
                        if reason is not None:
                            self.counters.reasons[reason] += 1
                if not has_grown:
                    return

    def _begin_growth(self, blocks: Sequence[Storable]) -> bool:
        """Return whether a slab is needed; files are then kept open until `_moved`."""
        with self._lock:
            may_grow = self._is_open and self._refusal() is None and self._slabs.can_grow
            if not may_grow or self._monotonic() < self._no_growth_until:
                return False
            num_new = len({block.key for block in blocks if block.key not in self._index} - self._writing)
            if num_new <= self._slabs.num_slots - self._index.num_taken:
                return False
            self._num_moving += 1
            return True

    def _restore(self) -> None:
        """Fill the index from the index file, and from the slabs where the index file is damaged."""
        slots = self._slabs.num_slots
        size = min(self._slabs.index_bytes, slots * RECORD_BYTES) // RECORD_BYTES * RECORD_BYTES
        table = memoryview(self._table)
        self._slabs.read_index(table[:size])
        sound = sound_records(table[:size], 0, self.block_bytes)
        if size < slots * RECORD_BYTES:
            scanned = self._scan_slabs(size // RECORD_BYTES, slots)
            sound = np.concatenate([sound, scanned])
            if not self.read_only:
                self._slabs.write_index(size // RECORD_BYTES, table[size : slots * RECORD_BYTES])
        self._enter_restored(self._reachable(sound))

    def _scan_slabs(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Read the records in front of the blocks of slots ``first .. last - 1``."""
        table = memoryview(self._table)
        for slot in range(first, last):
            fd, offset = self._slabs.place(slot)
            self._files.read(fd, [table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]], offset)
        raw = table[first * RECORD_BYTES : last * RECORD_BYTES]
        self.counters.reasons["index_truncated"] += 1
        return sound_records(raw, first, self.block_bytes) + first

    def _reachable(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Keep the slots whose bytes lie within their slab file."""
        whole = self._slabs.are_whole(slots)
        if not whole.all():
            self.counters.reasons["slab_truncated"] += int(np.count_nonzero(~whole))
        return slots[whole]

    def _enter_restored(self, slots: npt.NDArray[np.int64]) -> None:
        if not len(slots):
            self._restore_room(slots)
            return
        records = np.frombuffer(self._table, dtype=RECORD_DTYPE)[slots]
        # A clock that was ahead when they were written may be right now.
        records["used_at"] = np.minimum(records["used_at"], self._now())
        found = restored_blocks(slots, records)
        records = found.records
        self._lengths[found.slots] = records["length"]
        self._stored_bytes = int(records["length"].sum())
        self._restore_room(found.slots)
        self._generation = int(records["generation"].max())
        traits = BlockTraits(np.frombuffer(records["key"].tobytes(), dtype="<u8")[::4].astype(np.uint64))
        hints = hints_in(records)
        self._index.restore(
            found.slots.tolist(),
            found.keys,
            found.parents,
            found.parent_at,
            self._ranked_at(self._now()),
            traits,
            owners_in(records),
            hints,
        )
        for slot, hint in zip(found.slots.tolist(), hints, strict=True):
            self._hints[slot] = hint
        self._sessions[found.slots] = records["session"]
        self._used_at[found.slots] = records["used_at"]
        ttl_s = records["ttl_s"].astype(np.float64)
        self._ttl_s[found.slots] = np.where(np.isnan(ttl_s), self._default_ttl_s, ttl_s)

    def _restore_room(self, slots: npt.NDArray[np.int64]) -> None:
        """Count what the slots of blocks take; free the pages of all else."""
        if self._room is None:
            return
        held, whole = set(slots.tolist()), self._manifest.slot_bytes
        for slot in range(self._slabs.num_slots):
            start = self._room.take(slot, self._lengths.item(slot)).start if slot in held else 0
            self._discard(slot, range(start, whole))

    def _renewed(self, slots: Sequence[int]) -> None:
        if self.read_only:
            return
        try:
            for slot in slots:
                at = slot * RECORD_BYTES
                self._write_record(
                    slot, with_hint(bytes(self._table[at : at + RECORD_BYTES]), self._hints[slot])
                )
        except OSError as error:
            self.counters.reasons[_reason(error)] += 1

    def _write_record(self, slot: int, record: bytes) -> None:
        self._table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record
        self._slabs.write_index(slot, record)

    def _free_all(self) -> None:
        self._helper.shutdown(wait=False)
        self._write_last_uses()
        self._slabs.close()
        self._space.free()

    def _write_last_uses(self) -> None:
        """Update the times of last use on disk that are a second or more out of date."""
        if self.read_only:
            return
        table = np.frombuffer(self._table, dtype=RECORD_DTYPE)
        behind = (table["magic"] != 0) & (np.abs(self._used_at - table["used_at"]) >= 1.0)
        try:
            for slot in np.flatnonzero(behind).tolist():
                at = slot * RECORD_BYTES
                record = with_last_use(bytes(self._table[at : at + RECORD_BYTES]), float(self._used_at[slot]))
                self._write_record(slot, record)
        except OSError as error:
            self.counters.reasons[_reason(error)] += 1


def _reason(error: OSError) -> str:
    """Return the error's name in lower case: ``enospc``, ``eio``, ``erofs``."""
    if error.errno in READ_ONLY_ERRNOS:
        return "read_only"
    return errno.errorcode.get(error.errno or 0, "io_error").lower()
