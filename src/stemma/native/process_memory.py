"""Memory of this process: its present size, its peak, and returning unused memory to the system.

Sizes are read from Linux's /proc; malloc's options are glibc's. Elsewhere sizes raise OSError, and the
functions that return memory do nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

Mapping: TypeAlias = tuple[int, int, str]
"""First address, address after the last, file."""

CGROUP = Path("/sys/fs/cgroup")
"""Where the limit of the container is read (cgroup v2)."""
_PROC = Path("/proc/self")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MADV_DONTNEED = 4
_APART_BYTES = 1 << 20
_USUAL_APART_BYTES, _USUAL_TRIM_BYTES = 32 << 20, 64 << 20
"""Largest value of glibc's own, growing thresholds."""


def resident_bytes() -> int:
    """Return what this process holds in memory now, libraries and mapped files included."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the most that it held since its start or `reset_peak`."""
    return _status_bytes("VmHWM")


def available_bytes() -> int:
    """Return what can still be allocated without swapping, within the container's limit (cgroup v2)."""
    return min(_system_bytes(), _cgroup_bytes())


def _system_bytes() -> int:
    """Return the bytes that the kernel can provide without swapping; page cache counts as free."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_bytes() -> int:
    """Return the bytes left of the container's memory limit; a huge number if there is none."""
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = (CGROUP / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(0, int(limit) - int(used))


def reset_peak() -> None:
    """Make `peak_bytes` count from now on. Raises OSError where the kernel doesn't allow it."""
    (_PROC / "clear_refs").write_text("5", encoding="ascii")


def trim_heap() -> None:
    """Make malloc return freed memory to the system."""
    if (trim := _libc_function("malloc_trim")) is not None:
        trim(0)


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Make malloc map each block of a megabyte or more separately, so that freeing it leaves no hole in the
    heap.

    glibc stops doing so for blocks of a size that was freed before. Then weights lie in the heap, with holes
    between them that later steps fill one after another: 55 MB on the 0.5B shape.
    """
    mallopt = _libc_function("mallopt")
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _APART_BYTES)
    try:
        yield
    finally:
        # Steps need the opposite: fresh pages for every activation cost 20 % of a long prompt.
        mallopt(_M_MMAP_THRESHOLD, _USUAL_APART_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _USUAL_TRIM_BYTES)


LEAST_DROPPED_BYTES = 16 << 20
"""Smaller files keep their pages: to look for their mappings after each layer takes longer than the load."""


class MappedFiles:
    """Files that this process maps and hasn't written to."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._madvise = _libc_function("madvise")
        self._mappings: set[Mapping] = set()
        paths = [file.resolve() for file in files]
        if self._madvise is not None and sum(path.stat().st_size for path in paths) >= LEAST_DROPPED_BYTES:
            names = {str(path) for path in paths}
            smaps = (_PROC / "smaps").read_text(encoding="utf-8", errors="replace")
            self._mappings = clean_mappings(smaps, names)

    def drop_pages(self) -> None:
        """Take their pages out of this process; whoever reads them finds them in the page cache again."""
        if self._madvise is None or not self._mappings:
            return
        # The addresses of a mapping that has ended may belong to another one now.
        maps = (_PROC / "maps").read_text(encoding="utf-8", errors="replace")
        self._mappings &= {found for line in maps.splitlines() if (found := _mapping(line)) is not None}
        for start, end, _ in self._mappings:
            self._madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def clean_mappings(smaps: str, files: Container[str]) -> set[Mapping]:
    """Return the mappings of `files` that have no pages of our own: dropping those loses nothing."""
    found: set[Mapping] = set()
    current: Mapping | None = None
    for line in smaps.splitlines():
        if (mapping := _mapping(line)) is not None:
            current = mapping
        elif line.split()[:2] == ["Anonymous:", "0"] and current is not None and current[2] in files:
            found.add(current)
    return found


def _mapping(line: str) -> Mapping | None:
    """Parse the line of /proc/self/maps, or the first of an entry of smaps, that names a mapping."""
    addresses, *rest = line.split(maxsplit=5)
    if addresses.endswith(":"):
        return None
    start, end = (int(address, 16) for address in addresses.split("-"))
    return start, end, rest[4] if len(rest) == 5 else ""


def _status_bytes(field: str) -> int:
    for line in (_PROC / "status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _libc_function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None where it isn't there (musl, macOS)."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
