"""Reference-counted allocation of block ids. Knows nothing of requests, prefixes or bytes.

Free ids are kept on a stack, so a block that was just freed and may still be in a CPU cache is used next.
A fresh allocator returns 0, 1, 2, ... Every operation is O(number of ids), in numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stemma.errors import IntegrityError, OutOfBlocks
from stemma.types import BlockIds


class BlockAllocator:
    """Hands out ids ``0 .. num_blocks - 1`` and counts who holds them. Not thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._counts: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._stack: BlockIds = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = self._least_free = num_blocks

    @property
    def first_unused(self) -> int:
        """This id and all above were never handed out; `num_blocks` if all were."""
        return self.num_blocks - self._least_free

    @property
    def num_free(self) -> int:
        """Number of ids that nobody holds."""
        return self._num_free

    def allocate(self, num_blocks: int) -> BlockIds:
        """Return `num_blocks` free ids, each held once. Raises OutOfBlocks, taking none, if too few."""
        if num_blocks > self._num_free:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self._num_free} of {self.num_blocks} free")
        start = self._num_free - num_blocks
        ids = self._stack[start : self._num_free][::-1].copy()
        self._num_free = start
        self._least_free = min(self._least_free, start)
        self._counts[ids] = 1
        return ids

    def acquire(self, block_ids: BlockIds) -> None:
        """Add one reference to each of these distinct ids. Each must be held already."""
        counts = self._counts[block_ids]
        assert np.count_nonzero(counts) == len(counts), "acquire of a free block"
        self._counts[block_ids] = counts + 1

    def free(self, block_ids: BlockIds) -> int:
        """Remove one reference to each of these distinct ids; return how many became free."""
        counts = self._counts[block_ids]
        assert np.count_nonzero(counts) == len(counts), "free of a free block"
        self._counts[block_ids] = counts - 1
        freed = block_ids[counts == 1]
        # Reversed, so that a chain freed from its root is allocated again in the same order.
        self._stack[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)
        return len(freed)

    def counts(self) -> npt.NDArray[np.int32]:
        """Return how often each id is held, shape [num_blocks], a copy."""
        return self._counts.copy()

    def check(self) -> None:
        """Raise IntegrityError unless the stack holds exactly the ids whose count is 0, each once."""
        free = np.sort(self._stack[: self._num_free])
        expected = np.flatnonzero(self._counts == 0)
        if not np.array_equal(free, expected):
            raise IntegrityError(f"free stack {free.tolist()} is not the unheld ids {expected.tolist()}")
        if (self._counts < 0).any():
            raise IntegrityError("negative reference count")
