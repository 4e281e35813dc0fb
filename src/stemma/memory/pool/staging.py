"""Preallocated slots for values on their way: a header and, right behind it, one block."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from stemma.memory.pool.envelope import HEADER_BYTES

_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one value."""

    header: memoryview
    """`HEADER_BYTES` bytes."""
    payload: memoryview
    """`block_bytes` bytes."""
    whole: memoryview
    """Both, contiguous."""


class Staging:
    """A fixed number of slots; thread-safe. A slot belongs to whoever took it until it is given back."""

    def __init__(self, capacity_bytes: int, block_bytes: int) -> None:
        stride = -(-(HEADER_BYTES + block_bytes) // _ALIGNMENT) * _ALIGNMENT
        self.num_slots = max(2, capacity_bytes // stride)
        raw = np.empty(self.num_slots * stride + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        self.memory = raw[start : start + self.num_slots * stride].data
        """All slots, for `PoolBackend.register`."""
        self._free = [self._slot(index * stride, block_bytes) for index in range(self.num_slots)]
        self._changed = threading.Condition()

    @property
    def num_taken(self) -> int:
        """Slots in use now."""
        return self.num_slots - len(self._free)

    def take(self, at_most: int, timeout_s: float) -> list[Slot]:
        """Return 1 to `at_most` slots as soon as there is one, or none if that takes too long."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._free:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return []
            taken = self._free[-at_most:]
            del self._free[-at_most:]
            return taken

    def give(self, slots: list[Slot]) -> None:
        """Give slots back."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def _slot(self, start: int, block_bytes: int) -> Slot:
        whole = self.memory[start : start + HEADER_BYTES + block_bytes]
        return Slot(whole[:HEADER_BYTES], whole[HEADER_BYTES:], whole)
