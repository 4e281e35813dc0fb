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

from stemma.supervision import Supervisor, start_thread

_AT_ONCE_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23
"""Linux 5.14: fault pages in without touching them."""


class EarlyMemory:
    """Zeroed memory in huge pages, taken by one thread while another one fills it in."""

    def __init__(self, num_bytes: int, supervisor: Supervisor) -> None:
        """Begin to make at least `num_bytes` ready; does nothing where the system isn't Linux."""
        self._memory: mmap.mmap | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if sys.platform != "linux" or num_bytes == 0:
            return
        memory = mmap.mmap(-1, -(-num_bytes // _AT_ONCE_BYTES) * _AT_ONCE_BYTES, mmap.MAP_PRIVATE)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memory
        self._thread = start_thread("stemma-memory", lambda: self._populate(memory), supervisor)

    def take(self) -> mmap.mmap | None:
        """Return the memory, ready or not, once; None: there is none."""
        memory, self._memory = self._memory, None
        return memory

    def close(self) -> None:
        """Fill no more in; free the memory if nobody took it."""
        self._is_over.set()
        self.wait()
        self._memory = None

    def wait(self) -> None:
        """Wait until all of it is ready, or can't be made so."""
        if self._thread is not None:
            self._thread.join()

    def _populate(self, memory: mmap.mmap) -> None:
        madvise = ctypes.CDLL(None).madvise
        for offset in range(0, len(memory), _AT_ONCE_BYTES):
            if self._is_over.is_set():
                return
            view = ctypes.c_char.from_buffer(memory, offset)
            address = ctypes.c_void_p(ctypes.addressof(view))
            if madvise(address, ctypes.c_size_t(_AT_ONCE_BYTES), _MADV_POPULATE_WRITE) != 0:
                return  # an older kernel, or no memory: pages come as they are written
