"""Pool on a shared file system (NFS, Lustre, 3FS, a local disk): one file per value.

The path is ``ROOT/ab/cd/NAME``, where ``ab`` and ``cd`` are the first four hex digits of the block key (keys
are hashes, so the 65,536 directories fill evenly). A value is written to a temporary file in the target's
directory and renamed, which is atomic on POSIX file systems: readers see the whole value or none. Writers
take no lock: two writers of one key write the same bytes, and the later rename wins. Nothing is synced: the
checksum in front of the value detects a file torn by a power failure, and the read is a miss.

Every process enforces the size limit. It counts the bytes it wrote since it last checked, and checks after
5 % of the limit. If the total is near the limit, or the file system is full, it takes an advisory lock (so
that only one process collects), walks the tree and removes the least recently used files until 90 % of the
limit (or of the present size, if there is no limit) are left. This runs in its own thread. So the limit may
be exceeded for a short time by what all processes write until then.

A value past its TTL counts as absent at once; a collection frees its bytes. A collection removes only files
with the path and name of a value. Files are readable only by their owner, because KV reveals prompts:
servers that share a directory run as one user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
import secrets
import stat
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
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.pool.backend import Parts, PoolBackend, part_bytes
from stemma.memory.tiers.pool.keys import is_value_name
from stemma.memory.tiers.pool.registry import PoolConfig

logger = logging.getLogger(__name__)
_TEMPORARY = ".new-"
_STALE_TEMPORARY_S = 3600.0
_TOUCH_AFTER_S = 60.0
_LOOK_AFTER = 0.05
_LOOK_EVERY_S = 600.0
"""With a TTL: maximum time between checks for expired values."""
_FULL_AGAIN_S = 10.0
"""Minimum time between two collections caused by a full file system."""
_LOW_WATER = 0.9
_HEX_PAIR = re.compile("[0-9a-f]{2}")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DirectoryConfig(PoolConfig):
    """``--pool directory``: what its configuration file may say."""

    path: Path
    capacity: ByteSize | None = Field(default=None, gt=0)
    """Limit of the bytes of all values; None: only the file system's."""
    ttl_s: float | None = Field(default=None, gt=0)
    """Seconds of disuse after which a value is absent, and collected."""


@dataclass(frozen=True, slots=True)
class CollectionResult:
    """Result of one collection."""

    num_values: int
    """Values left."""
    num_bytes: int
    """Their bytes."""
    num_removed: int


def open_backend(config: Mapping[str, Any]) -> DirectoryPool:
    """Open (or create) the directory. Raises ConfigError or StorageError."""
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
        # Containers may have the same name and process numbers, and a process may have several clients.
        self._tag = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._unseen_bytes = 0
        self._looked_at = time.monotonic()
        self._found_full_at = -math.inf
        self._closed = False
        self._collector: threading.Thread | None = None
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"pool directory {self._root}: {error.strerror}") from error

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """One `stat` per key."""
        self._require_root()
        return [self._is_there(self._path(key)) for key in keys]

    def get_many(self, keys: Sequence[str], into: Sequence[Parts]) -> list[ReadResult]:
        """One open and one scattered read per key."""
        self._require_root()
        return [self._get(key, parts) for key, parts in zip(keys, into, strict=True)]

    def put_many(self, keys: Sequence[str], values: Sequence[Parts]) -> list[PutResult]:
        """One gathered write and one rename per key."""
        self._require_root()
        results = [self._put(key, parts) for key, parts in zip(keys, values, strict=True)]
        written = sum(
            part_bytes(parts)
            for parts, result in zip(values, results, strict=True)
            if result is PutResult.STORED
        )
        found_full = PutResult.NO_SPACE in results
        if self._time_to_look(written, found_full):
            self._collect_aside(make_room=found_full)
        return results

    def remove(self, keys: Sequence[str]) -> int:
        """One `unlink` per key."""
        self._require_root()
        return sum(_unlink(self._path(key)) for key in keys)

    def close(self) -> None:
        """Refuse further calls; the files stay."""
        self._closed = True

    def wait_for_collection(self) -> None:
        """Wait until the collection that a put started, if any, has ended."""
        if self._collector is not None:
            self._collector.join()

    def _collect_aside(self, *, make_room: bool) -> None:
        """Collect in a separate thread: walking the tree takes longer than a put may."""
        with self._lock:
            if self._collector is None or not self._collector.is_alive():
                self._collector = threading.Thread(
                    target=self._collect_quietly, args=(make_room,), name="stemma-pool-collect", daemon=True
                )
                self._collector.start()

    def _collect_quietly(self, make_room: bool) -> None:
        try:
            self.collect(make_room=make_room)
        except OSError as error:
            logger.warning("pool directory %s can't be cleaned: %s", self._root, error.strerror)
        except Exception:
            logger.exception("pool directory %s can't be cleaned", self._root)

    def collect(self, *, make_room: bool = False) -> CollectionResult | None:
        """Enforce the size limit and the TTL now; return None if another process is doing so.

        With `make_room`, a tenth of the values is removed even if there is no limit. Walks the whole tree:
        about a second per 100,000 values on a local disk.
        """
        with _collector_lock(self._root) as mine:
            if not mine:
                return None
            now = time.time()
            values = sorted(self._walk(now))
            total = sum(size for _, size, _ in values)
            limit = self._capacity
            target = total if limit is None else min(total, int(limit * _LOW_WATER))
            if make_room:
                target = min(target, int(total * _LOW_WATER))
            num_removed = 0
            for used_at, size, path in values:
                if not self._is_expired(used_at, now) and total <= target:
                    break
                if _was_used_since(path, used_at):
                    continue  # stored anew, perhaps, where it had expired
                if _unlink(path):
                    num_removed += 1
                total -= size
            return CollectionResult(len(values) - num_removed, total, num_removed)

    def _walk(self, now: float) -> Iterator[tuple[float, int, str]]:
        """Yield (last use, bytes, path) of each value; remove temporary files that a dead writer left.

        Other files in the directory aren't ours and stay.
        """
        for directory in self._value_directories():
            for entry in _entries(directory):
                is_value = is_value_name(entry.name) and self._path(entry.name) == entry.path
                if not is_value and not entry.name.startswith(_TEMPORARY):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if not stat.S_ISREG(status.st_mode):
                    continue
                if is_value:
                    yield status.st_mtime, status.st_size, entry.path
                elif now - status.st_mtime > _STALE_TEMPORARY_S:
                    _unlink(entry.path)

    def _value_directories(self) -> Iterator[str]:
        for outer in _entries(os.fspath(self._root)):
            if _HEX_PAIR.fullmatch(outer.name):
                yield from (inner.path for inner in _entries(outer.path) if _HEX_PAIR.fullmatch(inner.name))

    def _time_to_look(self, written_bytes: int, found_full: bool) -> bool:
        now = time.monotonic()
        with self._lock:
            self._unseen_bytes += written_bytes
            due = self._capacity is not None and self._unseen_bytes >= self._capacity * _LOOK_AFTER
            if found_full and now - self._found_full_at >= _FULL_AGAIN_S:
                due, self._found_full_at = True, now
            if self._ttl_s is not None and now - self._looked_at >= min(self._ttl_s, _LOOK_EVERY_S):
                due = True
            if due:
                self._unseen_bytes, self._looked_at = 0, now
            return due

    def _is_expired(self, used_at: float, now: float) -> bool:
        return self._ttl_s is not None and now - used_at > self._ttl_s

    def _is_there(self, path: str) -> bool:
        try:
            return not self._is_expired(os.stat(path, follow_symlinks=False).st_mtime, time.time())
        except OSError:
            return False

    def _touch(self, file: int | str, used_at: float, now: float) -> None:
        """Record a use, unless one was recorded recently or the file isn't writable."""
        if now - used_at > min(_TOUCH_AFTER_S, math.inf if self._ttl_s is None else self._ttl_s / 8):
            with contextlib.suppress(OSError):
                os.utime(file)

    def _require_root(self) -> None:
        if self._closed:
            raise StorageError("the pool directory is closed")
        # A lost mount must look like a broken pool, not like an empty one.
        if not os.path.isdir(self._root):
            raise StorageError(f"pool directory {self._root} is gone")

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key[:2], key[2:4], key)

    def _get(self, key: str, parts: Parts) -> ReadResult:
        try:
            # What isn't a plain file is damage; to open a pipe would wait for whoever writes to it.
            file = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return ReadResult.MISS
        except OSError:
            return ReadResult.ERROR
        try:
            status, now = os.fstat(file), time.time()
            if self._is_expired(status.st_mtime, now):
                return ReadResult.MISS
            is_plain = stat.S_ISREG(status.st_mode) and 0 < status.st_size <= part_bytes(parts)
            if not is_plain or not _read_all(file, parts, status.st_size):
                return ReadResult.CORRUPT
            self._touch(file, status.st_mtime, now)
            return ReadResult.HIT
        except OSError:
            return ReadResult.ERROR
        finally:
            os.close(file)

    def _put(self, key: str, parts: Parts) -> PutResult:
        path = self._path(key)
        with contextlib.suppress(OSError):
            used_at, now = os.stat(path, follow_symlinks=False).st_mtime, time.time()
            if not self._is_expired(used_at, now):
                self._touch(path, used_at, now)
                return PutResult.EXISTS
        temporary = os.path.join(os.path.dirname(path), f"{_TEMPORARY}{self._tag}-{next(self._serial)}")
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            _write_new(temporary, parts)
            os.replace(temporary, path)
        except OSError as error:
            _unlink(temporary)
            return PutResult.NO_SPACE if error.errno in _FULL else PutResult.ERROR
        return PutResult.STORED


def _write_new(path: str, parts: Parts) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        rest = [part for part in parts if part.nbytes]
        while rest:
            rest = _after(rest, os.writev(file, rest))
    finally:
        os.close(file)


def _read_all(file: int, parts: Parts, num_bytes: int) -> bool:
    """Fill `parts` with the file's first `num_bytes` bytes; False if it ends early."""
    rest = [part for part in parts if part.nbytes]
    offset = 0
    while offset < num_bytes:
        num_read = os.preadv(file, rest, offset)
        if num_read == 0:
            return False
        offset += num_read
        rest = _after(rest, num_read)
    return True


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the rest of `parts` after their first `num_bytes` bytes."""
    for index, part in enumerate(parts):
        if num_bytes < part.nbytes:
            return [part[num_bytes:], *parts[index + 1 :]]
        num_bytes -= part.nbytes
    return []


def _entries(directory: str) -> list[os.DirEntry[str]]:
    """Return the entries of a directory; none if it is gone or not readable."""
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def _was_used_since(path: str, used_at: float) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(path, follow_symlinks=False).st_mtime != used_at
    return False


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
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(root / ".collector", flags, 0o600)
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
