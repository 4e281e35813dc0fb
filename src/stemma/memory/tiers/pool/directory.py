"""Pool on a shared file system (NFS, Lustre, 3FS, a local disk): one value, one file.

``ROOT/ab/cd/NAME``, where ``ab`` and ``cd`` are the first four hex digits of the block key (keys are
hashes, so the 65,536 directories fill evenly). A value is written to a temporary file of its own beside the
target and renamed, which is atomic on POSIX file systems: readers see the whole value or none. There is no
lock between writers: two that write one key write the same bytes, and the later rename wins. There is no
fsync: the checksum in front of the value finds a file that a power failure tore, and it is then a miss.

The size limit is kept by whoever notices: each process counts what it wrote since its last look, and one
that finds the limit in danger takes an advisory lock (so that one collects at a time), walks the tree and
removes the files unused for longest until 90 % of the limit are left. This happens in a thread beside its
puts. So the limit may be passed for a short time, by what all processes write until then: each looks after
5 % of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import Field

from stemma.config.sizes import ByteSize
from stemma.errors import ConfigError, StorageError
from stemma.memory.tiers.pool.backend import Parts, PoolBackend, part_bytes
from stemma.memory.tiers.pool.registry import PoolConfig
from stemma.memory.tiers.store import PutResult, ReadResult

_log = logging.getLogger(__name__)
_TEMPORARY = ".new-"
_STALE_TEMPORARY_S = 3600.0
_TOUCH_AFTER_S = 60.0
_LOOK_AFTER = 0.05
_LOW_WATER = 0.9
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DirectoryConfig(PoolConfig):
    """``--pool directory``: what its configuration file may say."""

    path: Path
    capacity: ByteSize | None = Field(default=None, gt=0)
    """Bytes of all values together; None: no limit but the file system's."""
    ttl_s: float | None = Field(default=None, gt=0)
    """Seconds of disuse after which a collection removes a value."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collection did."""

    num_values: int
    """Values left."""
    num_bytes: int
    """Their bytes."""
    num_removed: int


def open_backend(config: Mapping[str, Any]) -> DirectoryPool:
    """Open (and make) the directory. Raises ConfigError or StorageError."""
    return DirectoryPool(DirectoryConfig.parse(config, pool="directory"))


class DirectoryPool(PoolBackend):
    """One file per value, safe with many writers and readers on many machines."""

    def __init__(self, config: DirectoryConfig) -> None:
        if not config.path.is_absolute():
            raise ConfigError(f"pool directory: path {config.path} must be absolute")
        self._root = config.path
        self._capacity = config.capacity
        self._ttl_s = config.ttl_s
        self._serial = count()
        self._tag = f"{os.uname().nodename}-{os.getpid()}"
        self._lock = threading.Lock()
        self._unseen_bytes = 0
        self._closed = False
        self._collector: threading.Thread | None = None
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"pool directory {self._root}: {error.strerror}") from error

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """One `stat` a key."""
        self._require_root()
        return [os.path.exists(self._path(key)) for key in keys]

    def get_many(self, keys: Sequence[str], into: Sequence[Parts]) -> list[ReadResult]:
        """One open and one scattered read a key."""
        self._require_root()
        return [self._get(key, parts) for key, parts in zip(keys, into, strict=True)]

    def put_many(self, keys: Sequence[str], values: Sequence[Parts]) -> list[PutResult]:
        """One gathered write and one rename a key."""
        self._require_root()
        results = [self._put(key, parts) for key, parts in zip(keys, values, strict=True)]
        written = sum(
            part_bytes(parts)
            for parts, result in zip(values, results, strict=True)
            if result is PutResult.STORED
        )
        if self._time_to_look(written, PutResult.NO_SPACE in results):
            self._collect_aside()
        return results

    def remove(self, keys: Sequence[str]) -> int:
        """One `unlink` a key."""
        self._require_root()
        return sum(_unlink(self._path(key)) for key in keys)

    def close(self) -> None:
        """Refuse further calls; the files stay."""
        self._closed = True

    def wait_for_collection(self) -> None:
        """Return when the collection that a put began, if any, is over."""
        if self._collector is not None:
            self._collector.join()

    def _collect_aside(self) -> None:
        """Collect in a thread of its own: a walk over the tree takes longer than a put may."""
        with self._lock:
            if self._collector is None or not self._collector.is_alive():
                self._collector = threading.Thread(
                    target=self._collect_quietly, name="stemma-pool-collect", daemon=True
                )
                self._collector.start()

    def _collect_quietly(self) -> None:
        try:
            self.collect()
        except OSError as error:
            _log.warning("pool directory %s can't be cleaned: %s", self._root, error.strerror)

    def collect(self) -> Collected | None:
        """Enforce the size limit and the TTL now; None if another process is at it.

        Walks the whole tree: about a second per 100,000 values on a local disk.
        """
        with _collector_lock(self._root) as mine:
            if not mine:
                return None
            now = time.time()
            values = sorted(self._walk(now))
            total = sum(size for _, size, _ in values)
            limit = self._capacity
            target = total if limit is None or total <= limit * _LOW_WATER else int(limit * _LOW_WATER)
            num_removed = 0
            for used_at, size, path in values:
                expired = self._ttl_s is not None and now - used_at > self._ttl_s
                if not expired and total <= target:
                    break
                if _unlink(path):
                    num_removed += 1
                total -= size
            return Collected(len(values) - num_removed, total, num_removed)

    def _walk(self, now: float) -> Iterator[tuple[float, int, str]]:
        """Yield (last use, bytes, path) of each value; remove temporary files that a dead writer left."""
        for directory, _, names in os.walk(self._root):
            for name in names:
                path = os.path.join(directory, name)
                try:
                    status = os.stat(path)
                except FileNotFoundError:
                    continue
                if not name.startswith("."):
                    yield status.st_mtime, status.st_size, path
                elif name.startswith(_TEMPORARY) and now - status.st_mtime > _STALE_TEMPORARY_S:
                    _unlink(path)

    def _time_to_look(self, written_bytes: int, found_full: bool) -> bool:
        if self._capacity is None:
            return False
        with self._lock:
            self._unseen_bytes += written_bytes
            if not found_full and self._unseen_bytes < self._capacity * _LOOK_AFTER:
                return False
            self._unseen_bytes = 0
            return True

    def _require_root(self) -> None:
        if self._closed:
            raise StorageError("the pool directory is closed")
        # A mount that went away must look like a broken pool, not like an empty one.
        if not os.path.isdir(self._root):
            raise StorageError(f"pool directory {self._root} is gone")

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key[:2], key[2:4], key)

    def _get(self, key: str, parts: Parts) -> ReadResult:
        try:
            file = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return ReadResult.MISS
        except OSError:
            return ReadResult.ERROR
        try:
            status = os.fstat(file)
            if status.st_size != part_bytes(parts) or not _read_all(file, parts):
                return ReadResult.CORRUPT
            if time.time() - status.st_mtime > _TOUCH_AFTER_S:
                # mtime is the time of last use. A reader without write permission leaves it.
                with contextlib.suppress(PermissionError):
                    os.utime(file)
            return ReadResult.HIT
        except OSError:
            return ReadResult.ERROR
        finally:
            os.close(file)

    def _put(self, key: str, parts: Parts) -> PutResult:
        path = self._path(key)
        if os.path.exists(path):
            return PutResult.EXISTS
        temporary = os.path.join(os.path.dirname(path), f"{_TEMPORARY}{self._tag}-{next(self._serial)}")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _write_new(temporary, parts)
            os.replace(temporary, path)
        except OSError as error:
            _unlink(temporary)
            return PutResult.NO_SPACE if error.errno in _FULL else PutResult.ERROR
        return PutResult.STORED


def _write_new(path: str, parts: Parts) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        rest = [part for part in parts if part.nbytes]
        while rest:
            rest = _after(rest, os.writev(file, rest))
    finally:
        os.close(file)


def _read_all(file: int, parts: Parts) -> bool:
    """Fill `parts` from the start of the file; False if it ends early."""
    rest = [part for part in parts if part.nbytes]
    offset = 0
    while rest:
        num_read = os.preadv(file, rest, offset)
        if num_read == 0:
            return False
        offset += num_read
        rest = _after(rest, num_read)
    return True


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of `parts` once their first `num_bytes` bytes are done."""
    for index, part in enumerate(parts):
        if num_bytes < part.nbytes:
            return [part[num_bytes:], *parts[index + 1 :]]
        num_bytes -= part.nbytes
    return []


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _collector_lock(root: Path) -> Iterator[bool]:
    """Hold the advisory lock of collectors; yields False if another process or thread holds it."""
    try:
        file = os.open(root / ".collector", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(file)
