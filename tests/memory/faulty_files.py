"""A file layer that breaks on command: the disk of the fault tests."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from stemma.memory.tiers.disk.files import FileLayer


class FaultyFiles(FileLayer):
    def __init__(self) -> None:
        self.read_errno = 0
        self.read_delay_s = 0.0
        self.write_errno = 0
        self.allocate_errno = 0
        self.write_torn_at: int | None = None
        """Writes stop after this many bytes and then fail, as in a crash or on a full disk."""

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(self.read_delay_s)
        self._fail(self.read_errno)
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        if self.write_torn_at is not None:
            data = b"".join(bytes(buffer) for buffer in buffers)
            super().write(fd, [data[: self.write_torn_at]], offset)
        self._fail(self.write_errno)
        super().write(fd, buffers, offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._fail(self.allocate_errno)
        super().allocate(fd, num_bytes)

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            self._fail(self.allocate_errno)
        return super().open(path, flags)

    @staticmethod
    def _fail(number: int) -> None:
        if number:
            raise OSError(number, os.strerror(number))
