"""One memory for blocks, and for places that take runs of blocks: recurrent states, pages of windows.

Memory is cut into slabs of equal size. A slab holds blocks, or places of one kind, or nothing; empty, it may
hold anything next. Blocks fill the fullest slabs first, so that others become empty.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from stemma.errors import IntegrityError, OutOfBlocks
from stemma.memory.device.allocator import BlockAllocator
from stemma.types import BlockIds

_EMPTY, _BLOCKS = 0, 1
STATES, PAGES, PADDING = 2, 3, 4
"""Kinds of places; padding is never written."""


class SlabAllocator(BlockAllocator):
    """A `BlockAllocator` whose slabs can be taken whole; slab s has the ids from ``s * slab`` on."""

    def __init__(self, num_blocks: int, slab: int, clear: Callable[[int], None] = lambda _slab: None) -> None:
        """`slab`: blocks of one, which divides `num_blocks`. `clear` zeroes what held something else."""
        super().__init__(num_blocks)
        assert num_blocks % slab == 0
        self.slab, self._clear = slab, clear
        num_slabs = num_blocks // slab
        self._kinds: npt.NDArray[np.uint8] = np.full(num_slabs, _EMPTY, dtype=np.uint8)
        self._held: npt.NDArray[np.uint8] = np.full(num_slabs, _EMPTY, dtype=np.uint8)
        """What each slab held last."""
        self._used: npt.NDArray[np.int32] = np.zeros(num_slabs, dtype=np.int32)
        """Blocks held in each slab of blocks."""
        self._opened: dict[int, None] = {}
        """Slabs of blocks that have free ones."""
        self._empty = list(range(num_slabs - 1, -1, -1))
        self._least_empty = num_slabs

    @property
    @override
    def first_unused(self) -> int:
        return self.slab * (len(self._kinds) - self._least_empty)

    @property
    def num_empty(self) -> int:
        """Slabs that hold nothing."""
        return len(self._empty)

    @property
    def num_slabs(self) -> int:
        """Number of slabs, held or not."""
        return len(self._kinds)

    def take_slab(self, kind: int) -> int:
        """Return an empty slab, for places of a kind."""
        return self._take_empty(kind)

    def give_back(self, slab: int) -> None:
        """Undo `take_slab`."""
        self._kinds[slab] = _EMPTY
        self._empty.append(slab)
        self._num_free += self.slab

    @override
    def allocate(self, num_blocks: int) -> BlockIds:
        if num_blocks > self._num_free:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self._num_free} of {self.num_blocks} free")
        opened = np.fromiter(self._opened, dtype=np.int64, count=len(self._opened))
        opened = opened[np.argsort(-self._used[opened], kind="stable")]
        ids = self._free_in(opened)[:num_blocks]
        num_slabs = -(-(num_blocks - len(ids)) // self.slab)
        if num_slabs:
            fresh = np.array([self._take_empty(_BLOCKS) for _ in range(num_slabs)], dtype=np.int64)
            self._num_free += num_slabs * self.slab
            ids = np.concatenate((ids, self._free_in(fresh)))[:num_blocks]
        self._counts[ids] = 1
        np.add.at(self._used, ids // self.slab, 1)
        self._note_opened(ids)
        self._num_free -= num_blocks
        return ids

    @override
    def free(self, block_ids: BlockIds) -> int:
        counts = self._counts[block_ids]
        assert np.count_nonzero(counts) == len(counts), "free of a free block"
        self._counts[block_ids] = counts - 1
        slabs = block_ids[counts == 1] // self.slab
        np.subtract.at(self._used, slabs, 1)
        self._note_opened(block_ids[counts == 1])
        for slab in np.unique(slabs[self._used[slabs] == 0])[::-1].tolist():
            self._kinds[slab] = _EMPTY
            self._empty.append(slab)
        self._num_free += len(slabs)
        return len(slabs)

    def can_empty(self, is_cached: npt.NDArray[np.bool_]) -> bool:
        """Return whether a slab of blocks would be empty if the index let go of what nobody else holds."""
        others = (self._counts - is_cached).reshape(-1, self.slab).max(axis=1)
        return bool(((others == 0) & (self._kinds == _BLOCKS)).any())

    @override
    def check(self) -> None:
        used = (self._counts > 0).reshape(-1, self.slab).sum(axis=1)
        if not np.array_equal(used, self._used) or (self._counts < 0).any():
            raise IntegrityError("counts of slabs don't match the blocks held")
        if used[self._kinds != _BLOCKS].any() or not used[self._kinds == _BLOCKS].all():
            raise IntegrityError("a slab isn't of the kind of what it holds")
        if sorted(self._empty) != np.flatnonzero(self._kinds == _EMPTY).tolist():
            raise IntegrityError("the empty slabs are others")
        if self._num_free != int((self.slab - used[self._kinds <= _BLOCKS]).sum()):
            raise IntegrityError("the number of free blocks is wrong")
        opened = (self._kinds == _BLOCKS) & (used < self.slab)
        if sorted(self._opened) != np.flatnonzero(opened).tolist():
            raise IntegrityError("the slabs with free blocks are others")

    def _take_empty(self, kind: int) -> int:
        slab = self._empty.pop()
        self._least_empty = min(self._least_empty, len(self._empty))
        self._num_free -= self.slab
        if self._held[slab] not in (_EMPTY, kind):
            self._clear(slab)
        self._kinds[slab] = self._held[slab] = kind
        return slab

    def _note_opened(self, block_ids: BlockIds) -> None:
        """Note which slabs of these blocks have both free blocks and others now."""
        for slab in np.unique(block_ids // self.slab).tolist():
            if 0 < self._used[slab] < self.slab:
                self._opened[slab] = None
            else:
                self._opened.pop(slab, None)

    def _free_in(self, slabs: npt.NDArray[np.int64]) -> BlockIds:
        """Return the ids that nobody holds in these slabs, in their order."""
        ids = slabs[:, None] * self.slab + np.arange(self.slab)
        free: BlockIds = ids[self._counts[ids] == 0].astype(np.int32)
        return free
