"""The files of one sub-directory: slabs, which contain the slots, and the index file.

A slab is added at full size when the store needs its slots, so that a full disk is noticed here and not in
the middle of a block. The last slab ends at the size limit. Slabs of packed blocks are sparse instead: a slot
takes only the pages of its block.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stemma.memory.tiers.disk.files import FileLayer
from stemma.memory.tiers.disk.record import RECORD_BYTES
from stemma.memory.tiers.disk.spaces import INDEX, Manifest, OpenSpace, make_room
from stemma.memory.tiers.slot_room import SlotRoom

_MAX_RUN = 512
"""Slots per call: each but the first takes two of the 1,024 buffers that one system call can fill."""


class SlabFiles:
    """Open files, by slot. Every method but `place` and `num_slots` may raise OSError."""

    def __init__(
        self, files: FileLayer, space: OpenSpace, capacity_blocks: int, room: SlotRoom | None
    ) -> None:
        """Nothing is open yet. `room` knows what the slots of sparse slabs take."""
        self._room = room
        self._files = files
        self._path = space.path
        self._manifest: Manifest = space.manifest
        self._read_only = space.read_only
        self._capacity_blocks = capacity_blocks
        self._slab_fds: list[int] = []
        self._index_fd = -1

    @property
    def num_slots(self) -> int:
        """Number of slots in all slabs."""
        return min(self._capacity_blocks, len(self._slab_fds) * self._manifest.slots_per_slab)

    @property
    def can_grow(self) -> bool:
        """Whether the limit allows another slab."""
        return self._slab_bytes(len(self._slab_fds)) > 0

    @property
    def index_bytes(self) -> int:
        """Length of the index file."""
        return self._files.size(self._index_fd)

    def place(self, slot: int) -> tuple[int, int]:
        """Return descriptor and offset of a slot."""
        slab, position = divmod(slot, self._manifest.slots_per_slab)
        return self._slab_fds[slab], position * self._manifest.slot_bytes

    def read_index(self, into: memoryview) -> int:
        """Read the index file from its beginning; return the bytes read."""
        return self._files.read(self._index_fd, [into], 0)

    def write_index(self, slot: int, records: bytes | memoryview) -> None:
        """Write the records of `slot` and those after it."""
        self._files.write(self._index_fd, [records], slot * RECORD_BYTES)

    def open(self) -> None:
        """Open the existing files; shorten them to the limit if the directory is writable."""
        flags = os.O_RDONLY if self._read_only else os.O_RDWR | os.O_CREAT
        self._index_fd = self._files.open(self._path / INDEX, flags)
        found = sorted(self._path.glob("slab-*"))
        for slab, path in enumerate(found):
            if path != self._slab_path(slab) or self._slab_bytes(slab) <= 0:
                if not self._read_only:
                    self._files.unlink(path)
                continue
            if slab != len(self._slab_fds):
                continue
            self._slab_fds.append(self._files.open(path, flags))
            if not self._read_only and self._files.size(self._slab_fds[-1]) > self._slab_bytes(slab):
                self._files.truncate(self._slab_fds[-1], self._slab_bytes(slab))
        index_bytes = self._num_index_bytes(len(self._slab_fds))
        if not self._read_only and self._files.size(self._index_fd) > index_bytes:
            self._files.truncate(self._index_fd, index_bytes)

    def add_slab(self, limit_bytes: int) -> bool:
        """Add a slab; False if the limit forbids it, or what is kept for a rollback, but for the first.

        Unused sub-directories are deleted first, so that the whole directory stays within `limit_bytes`. An
        OSError leaves everything unchanged.
        """
        slab = len(self._slab_fds)
        if not self.can_grow:
            return False
        fd = -1
        try:
            own = sum(self._slab_bytes(n) for n in range(slab + 1))
            if self._room is not None:
                own = self._room.num_bytes + self._slab_bytes(slab)
            own += (slab + 1) * self._manifest.slots_per_slab * RECORD_BYTES
            spared = limit_bytes // 2 if slab else max(0, limit_bytes - own)
            if not make_room(self._path.parent, self._path, own, limit_bytes, spared, time.time()) and slab:
                return False
            fd = self._files.open(self._slab_path(slab), os.O_RDWR | os.O_CREAT)
            if self._room is None:
                self._files.allocate(fd, self._slab_bytes(slab))
            else:
                self._files.truncate(fd, self._slab_bytes(slab))
            self._files.truncate(self._index_fd, self._num_index_bytes(slab + 1))
        except OSError:
            if fd >= 0:
                self._files.close(fd)
                self._files.unlink(self._slab_path(slab))
            raise
        self._slab_fds.append(fd)
        return True

    def shrink_to_nothing(self) -> None:
        """Empty the index file and delete all slabs."""
        self._files.truncate(self._index_fd, 0)
        while self._slab_fds:
            fd = self._slab_fds.pop()
            self._files.truncate(fd, 0)
            self._files.close(fd)
            self._files.unlink(self._slab_path(len(self._slab_fds)))

    def are_whole(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for which slots the whole block is in its slab file, which may have been truncated."""
        if not len(slots):
            return np.zeros(0, dtype=np.bool_)
        per_slab, stride = self._manifest.slots_per_slab, self._manifest.slot_bytes
        sizes = np.array([self._files.size(fd) for fd in self._slab_fds], dtype=np.int64)
        ends = slots % per_slab * stride + RECORD_BYTES + self._manifest.block_bytes
        whole: npt.NDArray[np.bool_] = ends <= sizes[slots // per_slab]
        return whole

    def discard(self, slot: int, unused: range) -> None:
        """Free the disk space of these bytes of a slot, whole pages."""
        fd, offset = self.place(slot)
        self._files.punch(fd, offset + unused.start, len(unused))

    def runs(self, slots: Sequence[int], max_bytes: int) -> list[slice]:
        """Split `slots` into runs of adjacent slots in one slab, of about `max_bytes` at most."""
        at_most = max(1, min(_MAX_RUN, max_bytes // self._manifest.block_bytes))
        runs: list[slice] = []
        start = 0
        for n in range(1, len(slots) + 1):
            ends = n == len(slots) or n - start == at_most or slots[n] != slots[n - 1] + 1
            if ends or slots[n] % self._manifest.slots_per_slab == 0:
                runs.append(slice(start, n))
                start = n
        return runs

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        for fd in [*self._slab_fds, *([self._index_fd] if self._index_fd >= 0 else [])]:
            self._files.close(fd)
        self._slab_fds, self._index_fd = [], -1

    def _slab_path(self, slab: int) -> Path:
        return self._path / f"slab-{slab:05d}"

    def _slab_bytes(self, slab: int) -> int:
        per_slab = self._manifest.slots_per_slab
        slots = min(per_slab, self._capacity_blocks - slab * per_slab)
        return slots * self._manifest.slot_bytes

    def _num_index_bytes(self, num_slabs: int) -> int:
        return min(num_slabs * self._manifest.slots_per_slab, self._capacity_blocks) * RECORD_BYTES
