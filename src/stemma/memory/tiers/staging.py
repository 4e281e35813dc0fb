"""A fixed number of block-sized host buffers for transfers between tiers."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch

from stemma.memory.device.pinned import host_rows


class StagingArena:
    """Allocates rows of one preallocated tensor, pinned if a CUDA device copies into it. Thread-safe."""

    def __init__(self, num_slots: int, block_bytes: int, *, pin_memory: bool = False) -> None:
        self.num_slots = num_slots
        # Zeroed now, so that the step loop never waits for a page fault.
        self._arena = host_rows(num_slots, block_bytes, pin_memory=pin_memory).zero_()
        self._bytes: npt.NDArray[np.uint8] = self._arena.numpy()
        self._free = list(range(num_slots))
        self._num_owners = [0] * num_slots
        self._freed = threading.Condition()

    @property
    def reserved_bytes(self) -> int:
        """Memory of all slots."""
        return self._bytes.nbytes

    @property
    def memory(self) -> memoryview:
        """All slots, for `BlockStore.register`."""
        return self._bytes.reshape(-1).data

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, at_most: int, num_owners: int = 1) -> list[int]:
        """Return up to `at_most` slots, without waiting; each is free after `num_owners` calls of `free`."""
        with self._freed:
            # The slots freed last: they are likely still in the CPU cache.
            taken = self._free[-at_most:][::-1] if at_most else []
            del self._free[len(self._free) - len(taken) :]
            for slot in taken:
                self._num_owners[slot] = num_owners
            return taken

    def free(self, slot: int) -> None:
        """Remove one owner of a slot."""
        with self._freed:
            self._num_owners[slot] -= 1
            if self._num_owners[slot] == 0:
                self._free.append(slot)
                self._freed.notify_all()

    def wait_free(self, timeout_s: float) -> bool:
        """Wait until a slot is free; return whether one is."""
        with self._freed:
            return self._freed.wait_for(lambda: bool(self._free), timeout_s)

    def tensor(self, slot: int) -> torch.Tensor:
        """Return a slot as uint8 [block_bytes]."""
        return self._arena[slot]

    def view(self, slot: int) -> memoryview:
        """Return a slot as a writable buffer of `block_bytes` bytes."""
        return memoryview(self._bytes[slot])
