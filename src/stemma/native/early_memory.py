"""Memory for weights, made ready by a thread while the interpreter still imports libraries.

Where the system gives a process its memory 2 MB at a time, and clears each page, a gigabyte of weights waits
most of a second for it. One core imports libraries for longer than that while the others idle.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections import deque

from stemma.supervision import Supervisor, start_thread

PIECE_BYTES = 64 << 20
_AT_ONCE_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23
"""Linux 5.14: fault pages in without touching them."""


class EarlyMemory:
    """Zeroed pieces of `PIECE_BYTES`, in huge pages. Taken by one thread while another one fills them in."""

    def __init__(self, num_bytes: int, supervisor: Supervisor) -> None:
        """Begin to make at least `num_bytes` ready; does nothing where the system isn't Linux."""
        self._pieces: deque[mmap.mmap] = deque()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if sys.platform != "linux":
            return
        count = -(-num_bytes // PIECE_BYTES)
        self._pieces.extend(mmap.mmap(-1, PIECE_BYTES, mmap.MAP_PRIVATE) for _ in range(count))
        for piece in self._pieces:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                piece.madvise(mmap.MADV_HUGEPAGE)
        pieces = tuple(self._pieces)
        self._thread = start_thread("stemma-memory", lambda: self._populate(pieces, num_bytes), supervisor)

    def take(self) -> mmap.mmap | None:
        """Return a piece, ready or not; None: there is none left."""
        return self._pieces.popleft() if self._pieces else None

    def close(self) -> None:
        """Free the pieces that nobody took."""
        self._is_over.set()
        self.wait()
        self._pieces.clear()

    def wait(self) -> None:
        """Wait until all pieces that nobody took are ready, or can't be made so."""
        if self._thread is not None:
            self._thread.join()

    def _populate(self, pieces: tuple[mmap.mmap, ...], num_bytes: int) -> None:
        madvise = ctypes.CDLL(None).madvise
        for offset in range(0, num_bytes, _AT_ONCE_BYTES):
            if self._is_over.is_set():
                return
            view = ctypes.c_char.from_buffer(pieces[offset // PIECE_BYTES], offset % PIECE_BYTES)
            address = ctypes.c_void_p(ctypes.addressof(view))
            if madvise(address, ctypes.c_size_t(_AT_ONCE_BYTES), _MADV_POPULATE_WRITE) != 0:
                return  # an older kernel, or no memory: pages come as they are written
