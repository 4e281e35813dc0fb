"""Numbered places that several may hold: states of recurrent layers, pages of windows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from stemma.errors import IntegrityError


class Slots:
    """Places 0 to `count` - 1, each with its holders counted. Not thread-safe."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._holders: npt.NDArray[np.int32] = np.zeros(count, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Places that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """Return a place that nobody held; the caller holds it."""
        place = self._free.pop()
        self._holders[place] = 1
        return place

    def hold(self, place: int) -> None:
        """Hold a place that somebody holds already."""
        self._holders[place] += 1

    def release(self, place: int) -> None:
        """Undo `take` or `hold`; without holders the place is free."""
        self._holders[place] -= 1
        if self._holders[place] == 0:
            self._free.append(place)

    def holders(self, place: int) -> int:
        """Return how many hold a place."""
        return int(self._holders[place])

    def check(self, held: Iterable[int]) -> None:
        """Raise IntegrityError unless these are the places that somebody holds, once a holder (slow)."""
        expected = np.bincount(np.fromiter(held, dtype=np.int64), minlength=self.count)
        free = np.zeros(self.count, dtype=np.bool_)
        free[self._free] = True
        if not np.array_equal(expected, self._holders) or not np.array_equal(free, expected == 0):
            raise IntegrityError("places of states or windows don't match their holders")
