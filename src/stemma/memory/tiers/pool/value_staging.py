"""Preallocated memory for values in transfer: slots for a header and one block, and for headers alone.

A block in registered memory is transferred without a copy, so it needs only a header. There are always enough
headers for whole batches. Slots are few if blocks are large (95 of 2 MB in 192 MiB), and small batches are
slow.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from stemma.memory.device.pinned import host_rows
from stemma.memory.tiers.pool.envelope import HEADER_BYTES

T = TypeVar("T")
_ALIGNMENT = 4096
_MOST = 512
"""Number of headers and maximum number of slots: eight batches of 64, more than there are calling threads."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory for one value."""

    header: memoryview
    """`HEADER_BYTES` bytes."""
    payload: memoryview
    """`block_bytes` bytes."""
    whole: memoryview
    """Both, contiguous."""


def staging_bytes(capacity_bytes: int, block_bytes: int) -> int:
    """Return the bytes of all slots and headers."""
    stride, num_slots = _slots(capacity_bytes, block_bytes)
    return num_slots * stride + _MOST * HEADER_BYTES


def _slots(capacity_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Return the bytes from one slot to the next, and the number of slots."""
    stride = -(-(HEADER_BYTES + block_bytes) // _ALIGNMENT) * _ALIGNMENT
    return stride, min(max(2, capacity_bytes // stride), _MOST)


class Room(Generic[T]):
    """A fixed number of items to take and free; thread-safe. A taken item belongs to the taker."""

    def __init__(self, free: list[T]) -> None:
        self.size = len(free)
        self._free = free
        self._changed = threading.Condition()

    @property
    def num_taken(self) -> int:
        """Number of items in use now."""
        return self.size - len(self._free)

    def take(self, at_most: int, timeout_s: float) -> list[T]:
        """Return 1 to `at_most` items as soon as one is free; none if that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._free:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return []
            taken = self._free[-at_most:]
            del self._free[-at_most:]
            return taken

    def free(self, things: list[T]) -> None:
        """Give things back, and wake who waits for them."""
        with self._changed:
            self._free.extend(things)
            self._changed.notify_all()


class Staging:
    """All the memory that values are staged in."""

    def __init__(self, capacity_bytes: int, block_bytes: int, *, pin_memory: bool = False) -> None:
        """`pin_memory`: a CUDA device copies out of the slots."""
        stride, num_slots = _slots(capacity_bytes, block_bytes)
        num_bytes = staging_bytes(capacity_bytes, block_bytes)
        raw = host_rows(1, num_bytes + _ALIGNMENT, pin_memory=pin_memory).numpy()[0]
        start = -raw.ctypes.data % _ALIGNMENT
        self.memory = raw[start : start + num_bytes].data
        """All slots and headers, for `PoolBackend.register`."""
        self.reserved_bytes = num_bytes
        self.slots = Room([self._slot(at * stride, block_bytes) for at in range(num_slots)])
        ends = range(num_slots * stride + HEADER_BYTES, num_bytes + 1, HEADER_BYTES)
        self.headers = Room([self.memory[end - HEADER_BYTES : end] for end in ends])

    def _slot(self, start: int, block_bytes: int) -> Slot:
        whole = self.memory[start : start + HEADER_BYTES + block_bytes]
        return Slot(whole[:HEADER_BYTES], whole[HEADER_BYTES:], whole)
