"""The arrays of a router's table of blocks (`block_table.py`), and how they are replaced by larger ones.

A word decides two sets, each by half of its bits, whose order is that of the sets. So with more sets, the
blocks of one set go to sets beside each other, and a table is moved in one pass, as if it were sorted.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]
"""Places in the table; -1: none."""
Flags = npt.NDArray[np.bool_]

SET = 16
BOTH = 2 * SET
NONE = np.uint32(0xFFFFFFFF)
"""No reference."""
_MOVED_AT_ONCE = 1 << 18
"""Slots."""
_EVENLY = 10
"""Places of a set that blocks are moved to when there is a choice; the mean is 11 after growing."""


def words_of(ids: Iterable[int] | Words) -> Words:
    """Return numbers of 64 bits as an array."""
    return ids if isinstance(ids, np.ndarray) else np.array(list(ids), dtype=np.uint64)


def mixed(words: Words) -> Words:
    """Return words whose bits all depend on all bits of `words` (SplitMix64's last steps)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Columns:
    """The arrays, all of one size. They are replaced together when the table grows."""

    def __init__(self, num_sets: int) -> None:
        self.num_sets = num_sets
        num_slots = num_sets * SET
        self.keys = _zeros(num_slots, np.uint64)
        """0: the slot is empty."""
        self.prints = _zeros(num_slots, np.uint32)
        self.owners = _zeros(num_slots, np.uint16)
        self.tiers = _zeros(num_slots, np.uint8)
        """A bit for each tier; 0: the slot is empty."""
        self.ages = _zeros(num_slots, np.uint8)
        """The time of the last use, modulo 256."""
        self.references = _zeros(num_slots, np.uint32)
        self.references[:] = NONE

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(one.nbytes for one in vars(self).values() if isinstance(one, np.ndarray))

    def sets(self, words: Words) -> Slots:
        """Return the two sets that each word decides, [..., 2]."""
        word = mixed(words)
        halves = np.stack((word >> np.uint64(32), word & np.uint64(0xFFFFFFFF)), axis=-1)
        return ((halves * np.uint64(self.num_sets)) >> np.uint64(32)).astype(np.int64)

    def find(self, keys: Words) -> Slots:
        """Return the slots of blocks by their keys."""
        sets = self.sets(keys)
        return first_of(sets, of_sets(self.keys, sets) == keys[:, None])

    def find_prints(self, prints: npt.NDArray[np.uint32], owner: int) -> Slots:
        """Return the slots of an owner's blocks by their prints."""
        sets = self.sets(spread(prints, np.uint64(owner)))
        referred = of_sets(self.references, sets)
        slots = np.where(referred == NONE, 0, referred)
        found = (referred != NONE) & (self.prints[slots] == prints[:, None])
        found &= (self.owners[slots] == owner) & (self.tiers[slots] != 0)
        places = first_of(sets, found)
        return np.where(places >= 0, self.references[places].astype(np.int64), -1)

    def unrefer(self, slots: Slots) -> None:
        """Remove the references to blocks."""
        sets = self.sets(spread(self.prints[slots], self.owners[slots].astype(np.uint64)))
        places = first_of(sets, of_sets(self.references, sets) == slots.astype(np.uint32)[:, None])
        self.references[places[places >= 0]] = NONE


def _zeros(num_slots: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return a column of zeros whose memory goes back to the system with it, whatever its size."""
    num_bytes = num_slots * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype)


def moved(old: Columns, num_sets: int, kept: Flags) -> tuple[Columns, Slots, Slots]:
    """Return new arrays with the blocks `kept`, [slots]; each stays in that of its sets in which it was.

    Besides, the old slots of blocks for which there was no room in it, and the new ones of blocks that
    nothing refers to yet. With more sets, those count as full that are about as full as the mean: what is
    entered anew, in the emptier one of two, keeps all of them even.
    """
    new, num_slots = Columns(num_sets), old.num_sets * SET
    places = np.full(num_slots, NONE, dtype=np.uint32)
    crowded, unreferred = [], []
    for start in range(0, num_slots, _MOVED_AT_ONCE):
        slots = start + np.flatnonzero(kept[start : start + _MOVED_AT_ONCE])
        at = _moved_to(old, new, old.keys[slots], slots, lambda part: new.keys[part] != 0)
        fits = at >= 0
        here, there = slots[fits], at[fits]
        for name in ("keys", "prints", "owners", "tiers", "ages"):
            getattr(new, name)[there] = getattr(old, name)[here]
        places[here] = there
        crowded.append(slots[~fits])
    for start in range(0, num_slots, _MOVED_AT_ONCE):
        at_old = start + np.flatnonzero(old.references[start : start + _MOVED_AT_ONCE] != NONE)
        at_old = at_old[places[old.references[at_old]] != NONE]
        slots = old.references[at_old].astype(np.int64)
        words = spread(old.prints[slots], old.owners[slots].astype(np.uint64))
        at = _moved_to(old, new, words, at_old, lambda part: new.references[part] != NONE)
        fits = at >= 0
        new.references[at[fits]] = places[slots[fits]]
        unreferred.append(places[slots[~fits]].astype(np.int64))
    return new, np.concatenate(crowded), np.concatenate(unreferred)


def _moved_to(
    old: Columns, new: Columns, words: Words, held_at: Slots, is_used: Callable[[slice], Flags]
) -> Slots:
    """Return the new places of what lies at `held_at` in one of the sets that `words` decide; -1: it is full.

    `is_used`: a part of the new places -> whether they are taken; those of a set are, from the first on.
    """
    if not len(words):
        return np.zeros(0, dtype=np.int64)
    is_second = old.sets(words)[:, 0] != held_at // SET
    sets = new.sets(words)
    into = np.where(is_second, sets[:, 1], sets[:, 0])
    order = np.argsort(into, kind="stable")
    into = into[order]
    firsts = np.flatnonzero(np.concatenate(([True], into[1:] != into[:-1])))
    rank = np.arange(len(into)) - np.repeat(firsts, np.diff(np.append(firsts, len(into))))
    low, high = int(into[0]), int(into[-1]) + 1
    used = is_used(slice(low * SET, high * SET)).reshape(-1, SET).sum(axis=1)
    rank += used[into - low]
    places = np.empty(len(into), dtype=np.int64)
    room = SET if new.num_sets == old.num_sets else _EVENLY
    places[order] = np.where(rank < room, into * SET + rank, -1)
    return places


def of_sets(column: npt.NDArray[Any], sets: Slots) -> npt.NDArray[Any]:
    """Return what a column has in two sets, [n, 2], each: [n, 32]."""
    return column.reshape(-1, SET)[sets].reshape(len(sets), BOTH)


def first_of(sets: Slots, found: Flags) -> Slots:
    """Return the first place of two sets each where `found`, [n, 32], or -1."""
    rows, at = np.arange(len(sets)), found.argmax(axis=1)
    return np.where(found[rows, at], sets[rows, at // SET] * SET + at % SET, -1)


def spread(prints: npt.NDArray[np.uint32], owners: Words | np.uint64) -> Words:
    """Return what decides on the window of a reference."""
    return prints.astype(np.uint64) | (owners << np.uint64(32))
