"""Directories that replicas take over from each other, so that a new one starts warm.

A replica holds the lock of one directory as long as it lives; the kernel frees it whatever ends the process.
A new replica takes the free directory that was used last. If none is free, it waits: in a rolling restart the
replica that it replaces is just about to end.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from stemma.errors import StorageError, StorageLocked

_POLL_S = 0.1


class DirectorySlot:
    """One directory, held until `close`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def close(self) -> None:
        """Let the next replica have it."""
        _stamp(self._fd)
        os.close(self._fd)


def take_slot(
    folder: Path, num_slots: int, wait_s: float, clock: Callable[[], float] = time.monotonic
) -> DirectorySlot:
    """Return a free directory of `folder`; make it if need be.

    Raises StorageLocked if none became free within `wait_s`, StorageError if the folder can't be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        deadline = clock() + wait_s
        while True:
            locks = [folder / f"slot-{number}.lock" for number in range(num_slots)]
            for lock in sorted(locks, key=_last_use, reverse=True):
                if (fd := _try_lock(lock)) is not None:
                    path = lock.with_suffix("")
                    path.mkdir(exist_ok=True)
                    _stamp(fd)
                    return DirectorySlot(path, fd)
            if clock() >= deadline:
                break
            time.sleep(_POLL_S)
    except OSError as error:
        raise StorageError(f"{folder} can't hold disk tiers: {error.strerror or error}") from error
    raise StorageLocked(
        f"all {num_slots} directories in {folder} belong to running replicas: "
        "stop one, or name another disk_cache"
    )


def _stamp(fd: int) -> None:
    """Note that the directory is used now; the kernel's own clock for files is coarse."""
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _last_use(lock: Path) -> int:
    try:
        return lock.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _try_lock(lock: Path) -> int | None:
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
