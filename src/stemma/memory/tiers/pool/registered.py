"""Which memory a backend may read and write in place."""

from __future__ import annotations

import numpy as np


class RegisteredMemory:
    """Address ranges announced to the backend; they stay alive as long as this object."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, memoryview]] = []

    def add(self, memory: memoryview) -> None:
        """Remember a contiguous range."""
        start = address_of(memory)
        self._ranges.append((start, start + memory.nbytes, memory))

    def covers(self, buffer: memoryview) -> bool:
        """Return whether `buffer` lies inside one range."""
        if not self._ranges:
            return False
        start = address_of(buffer)
        end = start + buffer.nbytes
        return any(first <= start and end <= last for first, last, _ in self._ranges)


def address_of(memory: memoryview) -> int:
    """Return the address of a contiguous buffer's first byte."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
