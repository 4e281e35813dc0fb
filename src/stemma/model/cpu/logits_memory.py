"""Memory of logits that steps take over from each other.

malloc maps blocks of more than 32 MB anew each time (glibc's largest threshold), page by page: 25 ms for 256
rows of 49,152 logits, in steps of 60 ms. Here a block whose last tensor is gone waits for the next step.
"""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt
import torch

_LEAST_BYTES = 16 << 20
"""Smaller ones are left to malloc, which keeps them."""
_MOST_KEPT_BYTES = 512 << 20
"""A larger block is freed with its tensor: only whole prompts that are scored need one."""


class LogitsMemory:
    """Hands out tensors; each has its memory to itself for as long as it, or a view of it, lives."""

    def __init__(self) -> None:
        self._spare: list[npt.NDArray[np.float32]] = []

    def take(self, num_rows: int, vocab_size: int) -> torch.Tensor:
        """Return a tensor [num_rows, vocab_size] float32 of any content."""
        size = num_rows * vocab_size
        if not _LEAST_BYTES <= 4 * size <= _MOST_KEPT_BYTES:
            return torch.empty(num_rows, vocab_size, dtype=torch.float32)
        block = self._spare.pop() if self._spare else None
        if block is None or block.size < size:
            block = np.empty(size, dtype=np.float32)
        owned = block[:size].reshape(num_rows, vocab_size)  # what torch keeps alive
        weakref.finalize(owned, self._give_back, block).atexit = False
        return torch.from_numpy(owned)

    def _give_back(self, block: npt.NDArray[np.float32]) -> None:
        """Keep the block; of several, the largest."""
        if not self._spare or self._spare[0].size < block.size:
            self._spare = [block]
