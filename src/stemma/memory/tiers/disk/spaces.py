"""The directory of the disk tier: one sub-directory per model, dtype, layout and block size.

::

    DIR/
      3f9c0d…/            named by a digest of everything the bytes depend on
        manifest.json     the same as text, and the geometry of the slabs
        lock              held (flock) by the server that uses the sub-directory
        index             128 bytes per slot: `record.py`
        slab-00000 …      slots: a record, the block, padding

A changed model therefore never reads old bytes: it uses another sub-directory. `DIR` has one size limit;
when a slab is added, caches of models that no server is using are deleted first, least recently used first.
What another version or other settings wrote of the same model keeps half of the limit for a week.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from stemma.errors import StorageError, StorageLocked, StorageMismatch
from stemma.memory.tiers.disk.record import DISK_FORMAT_VERSION, RECORD_BYTES
from stemma.prefix.keys import FORMAT_VERSION, KeySpace

MANIFEST = "manifest.json"
LOCK = "lock"
INDEX = "index"
KEPT_FOR_S = 7 * 86400.0
"""After its last use, for which a model's sub-directory of another version stays beside the one in use."""
READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Identity and layout of the bytes in one sub-directory."""

    model_fingerprint: str
    kv_layout: str
    block_size: int
    block_bytes: int
    key_format: int
    disk_format: int
    slots_per_slab: int

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next: record, block, padding to whole pages (or sectors)."""
        align = 4096 if self.block_bytes >= 65536 else 512
        return -(-(RECORD_BYTES + self.block_bytes) // align) * align

    def identity(self) -> dict[str, object]:
        """Return the fields that decide whether bytes can be read; the geometry of slabs isn't one."""
        fields = asdict(self)
        del fields["slots_per_slab"]
        return fields

    @property
    def digest(self) -> str:
        """Name of the sub-directory."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def new_manifest(space: KeySpace, block_bytes: int, size_bytes: int) -> Manifest:
    """Return the manifest of a fresh sub-directory in a directory limited to `size_bytes`.

    A slab has 256 MiB, or more if that would take over about 128 slabs, which limits open files.
    """
    manifest = Manifest(
        space.model_fingerprint,
        space.kv_layout,
        space.block_size,
        block_bytes,
        FORMAT_VERSION,
        DISK_FORMAT_VERSION,
        slots_per_slab=1,
    )
    slab_bytes = max(256 * 2**20, size_bytes // 128)
    fields = manifest.identity() | {"slots_per_slab": max(1, slab_bytes // manifest.slot_bytes)}
    return Manifest(**fields)  # type: ignore[arg-type]


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of a sub-directory, or None if it is missing or damaged."""
    try:
        fields = json.loads((path / MANIFEST).read_text())
        manifest = Manifest(**fields)
    except (OSError, ValueError, TypeError):
        return None
    numbers = (manifest.block_size, manifest.block_bytes, manifest.slots_per_slab)
    return manifest if all(isinstance(n, int) and n > 0 for n in numbers) else None


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest by atomic rename."""
    draft = path / (MANIFEST + ".new")
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(json.dumps(asdict(manifest), indent=2) + "\n")
    draft.replace(path / MANIFEST)


@dataclass(slots=True)
class OpenSpace:
    """A sub-directory that this process has locked."""

    path: Path
    manifest: Manifest
    read_only: bool
    lock_fd: int | None
    """None only if a read-only file system has no lock file."""

    def free(self) -> None:
        """Unlock it for other servers; a second call does nothing."""
        if self.lock_fd is not None:
            os.close(self.lock_fd)
            self.lock_fd = None


def open_space(root: Path, wanted: Manifest) -> OpenSpace:
    """Create or open the sub-directory of `wanted` under `root` and lock it.

    Raises StorageLocked if another process holds it, StorageMismatch if its manifest differs, StorageError if
    it can't be created. A read-only directory with readable content is opened read-only. If the manifest is
    damaged, the content is unusable and the sub-directory starts empty.
    """
    path = root / wanted.digest
    try:
        lock_fd, read_only = _create_and_lock(path)
    except OSError as error:
        raise StorageError(f"can't use the disk cache directory {path}: {error.strerror}") from error
    try:
        manifest = read_manifest(path)
        if manifest is None:
            if read_only:
                raise StorageError(f"the disk cache directory {path} is read-only and holds nothing to read")
            _wipe(path)
            write_manifest(path, wanted)
            manifest = wanted
        elif manifest.identity() != wanted.identity():
            raise StorageMismatch(_differences(path, manifest, wanted))
    except OSError as error:
        _close(lock_fd)
        raise StorageError(f"can't use the disk cache directory {path}: {error.strerror}") from error
    except StorageError:
        _close(lock_fd)
        raise
    return OpenSpace(path, manifest, read_only, lock_fd)


def _create_and_lock(path: Path) -> tuple[int | None, bool]:
    while True:
        path.mkdir(parents=True, exist_ok=True)
        read_only = not os.access(path, os.W_OK)
        fd = _take_lock(path, read_only=read_only)
        if fd is None or os.fstat(fd).st_nlink:
            return fd, read_only
        os.close(fd)  # the sub-directory was deleted between open and lock


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


def _take_lock(path: Path, *, read_only: bool) -> int | None:
    flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
    try:
        fd = os.open(path / LOCK, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        if read_only:
            return None
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = (path / LOCK).read_text().strip() or "unknown"
        os.close(fd)
        raise StorageLocked(
            f"another server (process {owner}) uses the disk cache {path}; give this one its own directory"
        ) from None
    if not read_only:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _wipe(path: Path) -> None:
    for file in path.iterdir():
        if file.name != LOCK:
            file.unlink()


def _differences(path: Path, found: Manifest, wanted: Manifest) -> str:
    have, want = found.identity(), wanted.identity()
    fields = [f"{name} is {have[name]!r}, not {want[name]!r}" for name in want if have[name] != want[name]]
    return f"{path} was written for something else: " + "; ".join(fields)


@dataclass(frozen=True, slots=True)
class SpaceInfo:
    """One sub-directory as `stemma cache ls` shows it."""

    path: Path
    manifest: Manifest | None
    """None if damaged."""
    allocated_bytes: int
    """Bytes that its files take on the disk."""
    used_at: float
    """Last change of any file, seconds since 1970."""
    in_use: bool
    """Whether a server holds it now."""


def list_spaces(root: Path) -> list[SpaceInfo]:
    """Return the sub-directories of a cache directory, least recently used first; other files are ignored.

    Raises StorageError if `root` can't be listed.
    """
    try:
        paths = sorted(path for path in root.iterdir() if _is_space(path))
    except OSError as error:
        raise StorageError(f"can't list {root}: {error.strerror}") from error
    spaces = []
    for path in paths:
        try:
            stats = [file.lstat() for file in path.iterdir()]
        except OSError:  # deleted since, or not readable
            continue
        allocated = sum(stat.st_blocks * 512 for stat in stats)
        used_at = max((stat.st_mtime for stat in stats), default=0.0)
        spaces.append(SpaceInfo(path, read_manifest(path), allocated, used_at, _is_locked(path)))
    return sorted(spaces, key=lambda space: space.used_at)


def _is_space(path: Path) -> bool:
    """Return whether a sub-directory is ours by name and content, so that nothing else is deleted."""
    name = path.name
    is_digest = len(name) == 16 and all(c in "0123456789abcdef" for c in name)
    return is_digest and path.is_dir() and ((path / LOCK).exists() or (path / MANIFEST).exists())


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def locked_space(path: Path) -> Iterator[None]:
    """Hold a sub-directory's lock; raises StorageLocked if a server has it."""
    try:
        fd = _take_lock(path, read_only=False)
    except OSError as error:
        raise StorageError(f"can't use {path}: {error.strerror}") from error
    try:
        yield
    finally:
        _close(fd)


def remove_space(path: Path) -> None:
    """Delete a sub-directory that no server holds; StorageLocked if one does."""
    with locked_space(path):
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise StorageError(f"can't delete {path}: {error.strerror}") from error


def make_room(root: Path, own: Path, own_bytes: int, limit_bytes: int, spared_bytes: int, now: float) -> bool:
    """Free disk space of unused sub-directories until all but `own`, and `own_bytes`, fit the limit.

    Those of other models go first, least recently used first; then those of this model that another version
    or other settings wrote, of which `spared_bytes` are kept while they were used lately, so that a rollback
    finds them. Sub-directories that other servers hold count against those servers' limits. Returns whether
    it fits.
    """
    unused = [space for space in list_spaces(root) if space.path != own and not space.in_use]
    kept = [space for space in unused if is_kept(space, own, now)]
    excess = own_bytes + sum(space.allocated_bytes for space in unused) - limit_bytes
    for space in [one for one in unused if one not in kept]:
        if excess <= 0:
            return True
        with suppress(StorageError):
            remove_space(space.path)
            excess -= space.allocated_bytes
    for space in reversed(kept):  # the one used last is wanted most
        left = min(space.allocated_bytes, spared_bytes)
        spared_bytes -= left
        with suppress(StorageError):
            if excess > 0 and left < space.allocated_bytes:
                excess -= _trim(space, max(left, space.allocated_bytes - excess))
    return excess <= 0


def is_kept(space: SpaceInfo, own: Path, now: float) -> bool:
    """Whether a sub-directory is of the model in `own` as well, and was used lately."""
    mine = read_manifest(own)
    is_same = None not in (mine, space.manifest) and (
        space.manifest.model_fingerprint == mine.model_fingerprint  # type: ignore[union-attr]
    )
    return is_same and now - space.used_at < KEPT_FOR_S


def _trim(space: SpaceInfo, num_bytes: int) -> int:
    """Cut slabs off at the end until about so many bytes are left; return the bytes freed.

    Blocks that aren't whole any more are dropped when it is opened.
    """
    freed = 0
    with locked_space(space.path):
        times = {path: path.stat() for path in space.path.iterdir()}
        for slab in sorted(space.path.glob("slab-*"), reverse=True):
            stat = slab.stat()
            before = stat.st_blocks * 512
            cut = min(before, space.allocated_bytes - num_bytes - freed)
            if cut <= 0:
                break
            try:
                if cut == before:
                    slab.unlink()
                else:
                    # What is packed has holes, evenly.
                    os.truncate(slab, (before - cut) * max(stat.st_size, before) // before)
            except OSError as error:
                raise StorageError(f"can't shorten {slab}: {error.strerror}") from error
            freed += cut
        for path, stat in times.items():  # it wasn't used
            if path.exists():
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return freed
