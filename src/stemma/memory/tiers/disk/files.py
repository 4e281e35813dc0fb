"""The file operations that the disk tier needs. Tests inject disk faults here.

No memory maps: touching a page beyond the end of a truncated file would kill the process with SIGBUS. No
fsync: every read verifies its bytes, so writes lost in a power cut are misses, not errors.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Of fallocate(2)."""
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class FileLayer:
    """Positioned reads and writes that are complete or raise OSError. Thread-safe."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file (mode 0600 if created: KV reveals prompts); return its descriptor.

        A symbolic link raises OSError ELOOP: its target isn't ours to write.
        """
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return the length of the file in bytes."""
        return os.fstat(fd).st_size

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` from `offset` on; return the bytes read, fewer only at the end of the file."""
        total, wanted = 0, sum(buffer.nbytes for buffer in buffers)
        views = list(buffers)
        while total < wanted:
            count = os.preadv(fd, views, offset + total)
            if count == 0:
                break
            total += count
            views = _after(views, count)
        return total

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Write all of `buffers` at `offset`."""
        views = [memoryview(buffer) for buffer in buffers]
        while views:
            count = os.pwritev(fd, views, offset)
            offset += count
            views = _after(views, count)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Make the file `num_bytes` long and reserve its space; OSError ENOSPC if there is too little."""
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, max(num_bytes, self.size(fd)))

    def will_read(self, fd: int, offset: int, num_bytes: int) -> None:
        """Tell the kernel to start reading this range ahead."""
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Shorten the file, or extend it with a hole."""
        os.ftruncate(fd, num_bytes)

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        """Free the disk space of whole pages of the file, which keeps its length."""
        if _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, num_bytes):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def unlink(self, path: Path) -> None:
        """Delete a file."""
        path.unlink(missing_ok=True)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of `views` after their first `count` bytes."""
    left: list[memoryview] = []
    for view in views:
        if count >= view.nbytes:
            count -= view.nbytes
        else:
            left.append(view[count:])
            count = 0
    return left
