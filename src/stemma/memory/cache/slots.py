"""Numbered places that several may hold: states of recurrent layers, pages of windows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from stemma.errors import IntegrityError
from stemma.memory.device.slabs import SlabAllocator


class Slots:
    """Places of one kind in the slabs of a memory, each with its holders counted. Not thread-safe.

    A slab is taken when a place in it is, and given back when nobody holds any.
    """

    def __init__(self, slabs: SlabAllocator, per_slab: int, kind: int) -> None:
        """`per_slab`: places of a slab; 0: there are none."""
        self._slabs, self._per_slab, self._kind = slabs, per_slab, kind
        self.count = slabs.num_slabs * per_slab
        """Places that there may be at most."""
        self.num_leased = 0
        """Places that others than checkpoints hold."""
        self._free: dict[int, None] = {}
        """Places in taken slabs that nobody holds."""
        self._holders: npt.NDArray[np.int32] = np.zeros(self.count, dtype=np.int32)
        self._kept: npt.NDArray[np.int32] = np.zeros(self.count, dtype=np.int32)
        """How many of the holders are checkpoints."""
        self._leased: npt.NDArray[np.int32] = np.zeros(slabs.num_slabs, dtype=np.int32)
        """By slab: its places that others hold."""
        self._num_taken = self._num_leased_slabs = 0

    @property
    def num_free(self) -> int:
        """Places that can be taken."""
        return len(self._free) + self._slabs.num_empty * self._per_slab

    @property
    def num_spare_slabs(self) -> int:
        """Slabs that would be empty without checkpoints."""
        return self._num_taken - self._num_leased_slabs

    def take(self) -> int:
        """Return a place that nobody held; the caller holds it."""
        if not self._free:
            first = self._slabs.take_slab(self._kind) * self._per_slab
            self._num_taken += 1
            self._free.update(dict.fromkeys(range(first + self._per_slab - 1, first - 1, -1)))
        place, _ = self._free.popitem()
        self._holders[place] = 1
        self._lease(place, 1)
        return place

    def hold(self, place: int) -> None:
        """Hold a place that somebody holds already."""
        if self._holders[place] == self._kept[place]:
            self._lease(place, 1)
        self._holders[place] += 1

    def release(self, place: int) -> None:
        """Undo `take` or `hold`; without holders the place is free."""
        self._holders[place] -= 1
        if self._holders[place] == self._kept[place]:
            self._lease(place, -1)
        self._end(place)

    def keep(self, place: int) -> None:
        """Let a checkpoint hold a place that somebody holds already."""
        self._holders[place] += 1
        self._kept[place] += 1

    def let_go(self, place: int) -> None:
        """Undo `keep`."""
        self._holders[place] -= 1
        self._kept[place] -= 1
        self._end(place)

    def holders(self, place: int) -> int:
        """Return how many hold a place."""
        return int(self._holders[place])

    def check(self, held: Iterable[int]) -> None:
        """Raise IntegrityError unless these are the places that somebody holds, once a holder (slow)."""
        expected = np.bincount(np.fromiter(held, dtype=np.int64), minlength=self.count)
        if not np.array_equal(expected, self._holders):
            raise IntegrityError("places of states or windows don't match their holders")
        leased = (self._holders > self._kept).reshape(-1, max(1, self._per_slab)).sum(axis=1)
        if self.count and not np.array_equal(leased, self._leased):
            raise IntegrityError("places of sequences are counted wrong")
        if any(expected[place] for place in self._free):
            raise IntegrityError("a place is free and held")

    def _lease(self, place: int, change: int) -> None:
        slab = place // self._per_slab
        self.num_leased += change
        before = self._leased[slab] > 0
        self._leased[slab] += change
        self._num_leased_slabs += int(self._leased[slab] > 0) - int(before)

    def _end(self, place: int) -> None:
        """Free a place that has lost its last holder, and its slab with it if it was the last there."""
        if self._holders[place]:
            return
        self._free[place] = None
        first = place // self._per_slab * self._per_slab
        mates = range(first, first + self._per_slab)
        if not self._holders[first : first + self._per_slab].any():
            for mate in mates:
                del self._free[mate]
            self._num_taken -= 1
            self._slabs.give_back(first // self._per_slab)
