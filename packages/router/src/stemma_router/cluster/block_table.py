"""A hash table of blocks in numpy arrays, for a router that knows a hundred million of them.

A block has a slot in one of two sets of 16 that its key decides, the emptier one, and a reference to that
slot in one of two sets of a second table that its print decides. So it is found by either, for thousands of
blocks in one call. It takes 16 bytes for the slot and 4 for the reference. Where both sets are full, that
block of theirs which was used longest ago makes room.

One thread writes; others may read meanwhile. They see a block that is being replaced, and nothing worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

import numpy as np
import numpy.typing as npt

from stemma.errors import IntegrityError
from stemma_router.cluster.block_columns import (
    NONE,
    SET,
    Columns,
    Flags,
    Slots,
    Words,
    moved,
    of_sets,
    spread,
)

_MOST_FULL = 0.85
"""Above it sets overflow, and blocks are evicted though there is room elsewhere."""
_GROWTH = 1.25
_FIRST_SETS = 256
_CHUNK = 1 << 12
"""Blocks of one call that are worked on together."""
_AGE_STEPS = 64
"""Steps of age while as many blocks are put as there are slots."""
_OLDEST = 255


class BlockTable:
    """Blocks by key, and by owner and print."""

    def __init__(self, max_blocks: int) -> None:
        self.counts: Counter[int] = Counter()
        """Blocks by owner, those without any left out."""
        self.num_evicted = 0
        self._max_sets = max(_FIRST_SETS, int(max_blocks / _MOST_FULL / SET) + 1)
        self._columns = Columns(_FIRST_SETS)
        self._age = np.uint8(0)
        self._num_put = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the table, those included of owners that were given up."""
        return self.counts.total()

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return self._columns.num_bytes

    def is_full(self, num_more: int) -> bool:
        """Return whether `num_more` blocks would make the table too full."""
        return self.num_blocks + num_more > _MOST_FULL * self._columns.num_sets * SET

    def grow(self, num_more: int) -> None:
        """Make room for `num_more` blocks, as far as the table may grow."""
        columns = self._columns
        needed = int((self.num_blocks + num_more) / _MOST_FULL / SET) + 1
        num_sets = min(self._max_sets, max(needed, int(_GROWTH * columns.num_sets)))
        if needed > columns.num_sets and num_sets > columns.num_sets:
            self._rebuild(num_sets, columns.tiers != 0)

    def sweep(self, live: Collection[int]) -> None:
        """Drop the blocks of all owners but these."""
        columns = self._columns
        is_live = np.isin(columns.owners, np.array(sorted(live), dtype=np.uint16))
        self._rebuild(columns.num_sets, is_live & (columns.tiers != 0))

    def put(self, keys: Words, prints: Words, owner: int, tier: int) -> None:
        """Enter blocks of an owner, or note that they are in a further tier. Keys may occur twice."""
        columns = self._columns
        for start in range(0, len(keys), _CHUNK):
            part, first = np.unique(_not_zero(keys[start : start + _CHUNK]), return_index=True)
            slots = columns.find(part)
            known = slots[slots >= 0]
            columns.tiers[known] |= np.uint8(tier)
            columns.ages[known] = self._age
            new = slots < 0
            self._enter(
                part[new],
                _low(prints[start : start + _CHUNK][first][new]),
                np.full(np.count_nonzero(new), owner, dtype=np.uint16),
                np.full(np.count_nonzero(new), tier, dtype=np.uint8),
            )

    def holds(self, keys: Words) -> Flags:
        """Return which blocks are in the table, by their keys; those count as used."""
        columns = self._columns
        slots = columns.find(_not_zero(keys))
        held: Flags = slots >= 0
        columns.ages[slots[held]] = self._age
        return held

    def keys_of(self, prints: Words, owner: int) -> Words:
        """Return the keys of an owner's blocks by their prints; 0 where there is no such block."""
        columns = self._columns
        slots = columns.find_prints(_low(prints), owner)
        return np.where(slots >= 0, columns.keys[slots], np.uint64(0))

    def add_tier(self, prints: Words, owner: int, tier: int) -> int:
        """Note that an owner's blocks are in a further tier; return how many aren't known."""
        columns = self._columns
        slots = columns.find_prints(_low(prints), owner)
        columns.tiers[slots[slots >= 0]] |= np.uint8(tier)
        return int(np.count_nonzero(slots < 0))

    def remove_tier(self, prints: Words, owner: int, tier: int) -> None:
        """Note that an owner's blocks left a tier; those that are in none are dropped."""
        slots = self._columns.find_prints(_low(prints), owner)
        self._keep_tiers(np.unique(slots[slots >= 0]), ~tier & 0xFF)

    def keep_tier(self, owner: int, tier: int) -> None:
        """Note that an owner's blocks are in this tier alone; those that aren't are dropped."""
        columns = self._columns
        self._keep_tiers(np.flatnonzero((columns.owners == owner) & (columns.tiers != 0)), tier)

    def check(self) -> None:
        """Raise IntegrityError if counts, keys and references don't agree (slow)."""
        columns = self._columns
        held = np.flatnonzero(columns.tiers)
        if Counter(columns.owners[held].tolist()) != self.counts:
            raise IntegrityError("counts by owner differ from the table's")
        if (held != np.flatnonzero(columns.keys)).any() or (columns.find(columns.keys[held]) != held).any():
            raise IntegrityError("a block isn't where its key says")

    # -- below: a block that is entered gets one slot and one reference ------------------------------------

    def _enter(
        self,
        keys: Words,
        prints: npt.NDArray[np.uint32],
        owners: npt.NDArray[np.uint16],
        tiers: npt.NDArray[np.uint8],
    ) -> None:
        """Enter blocks that aren't in the table; each key occurs once."""
        columns = self._columns
        self._grow_older(len(keys))
        left = np.arange(len(keys))
        while len(left):
            sets = columns.sets(keys[left])
            at, winners = _chosen(sets, of_sets(columns.keys, sets) == 0, partial(self._set_ages, sets))
            won = left[winners]
            self._evict(at[columns.keys[at] != 0])
            columns.prints[at], columns.owners[at] = prints[won], owners[won]
            columns.tiers[at], columns.ages[at] = tiers[won], self._age
            columns.keys[at] = keys[won]
            self._count(owners[won], 1)
            self._refer(at)
            left = left[~winners]

    def _refer(self, left: Slots) -> None:
        """Let the second table refer to blocks that were just entered."""
        columns = self._columns
        while len(left):
            sets = columns.sets(spread(columns.prints[left], columns.owners[left].astype(np.uint64)))
            referred = of_sets(columns.references, sets)
            at, winners = _chosen(sets, referred == NONE, partial(self._block_ages, referred))
            crowded_out = columns.references[at]
            columns.references[at] = left[winners].astype(np.uint32)
            self._evict(crowded_out[crowded_out != NONE].astype(np.int64))  # nobody could find them
            left = left[~winners]

    def _set_ages(self, sets: Slots, rows: Slots) -> npt.NDArray[np.uint8]:
        return self._age - of_sets(self._columns.ages, sets[rows])

    def _block_ages(self, slots: npt.NDArray[np.uint32], rows: Slots) -> npt.NDArray[np.uint8]:
        ages: npt.NDArray[np.uint8] = self._age - self._columns.ages[slots[rows]]
        return ages

    def _keep_tiers(self, slots: Slots, tiers: int) -> None:
        columns = self._columns
        columns.tiers[slots] &= np.uint8(tiers)
        gone = slots[columns.tiers[slots] == 0]
        if len(gone):
            columns.unrefer(gone)
            self._count(columns.owners[gone], -1)
            columns.keys[gone] = 0

    def _evict(self, slots: Slots) -> None:
        if not len(slots):
            return
        self.num_evicted += len(slots)
        self._keep_tiers(slots, 0)

    def _count(self, owners: npt.NDArray[np.uint16], by: int) -> None:
        found, counts = np.unique(owners, return_counts=True)
        for owner, count in zip(found.tolist(), counts.tolist(), strict=True):
            self.counts[owner] += by * count
            if not self.counts[owner]:
                del self.counts[owner]

    def _grow_older(self, num_put: int) -> None:
        """Let time pass by what is put, so that ages tell times within four turnovers of the table."""
        self._num_put += num_put
        step = max(1, self._columns.num_sets * SET // _AGE_STEPS)
        while self._num_put >= step:
            self._num_put -= step
            ages = self._columns.ages
            is_oldest = (self._age - ages) == _OLDEST
            with np.errstate(over="ignore"):
                self._age = self._age + np.uint8(1)
                ages[is_oldest] = self._age + np.uint8(1)  # it stays as old as can be told

    def _rebuild(self, num_sets: int, kept: Flags) -> None:
        """Move these blocks, [slots], to new arrays; they stay as old as they are."""
        old, made = self._columns, BlockTable(0)
        made._columns, crowded, unreferred = moved(old, num_sets, kept)
        made._age, made.counts = self._age, self.counts.copy()
        dropped = np.bincount(old.owners[(old.tiers != 0) & ~kept])
        entered = np.bincount(old.owners[crowded])
        for owner in {*np.flatnonzero(dropped).tolist(), *np.flatnonzero(entered).tolist()}:
            made.counts[owner] -= sum(int(one[owner]) for one in (dropped, entered) if owner < len(one))
        made.counts = +made.counts
        for start in range(0, len(crowded), _CHUNK):
            part = crowded[start : start + _CHUNK]
            made._num_put = -len(part)  # no time passes
            made._enter(old.keys[part], old.prints[part], old.owners[part], old.tiers[part])
            slots = made._columns.find(old.keys[part])
            made._columns.ages[slots[slots >= 0]] = old.ages[part[slots >= 0]]
        made._refer(unreferred[made._columns.tiers[unreferred] != 0])
        self._columns, self.counts = made._columns, made.counts
        self.num_evicted += made.num_evicted


def _chosen(
    sets: Slots, is_free: Flags, ages_of: Callable[[Slots], npt.NDArray[np.uint8]]
) -> tuple[Slots, Flags]:
    """Choose a place for each row of `sets`: a free one in the emptier set, or the oldest of both.

    `ages_of`: rows -> [n, 32]. Return the places of those rows that get theirs in this round, [m], and which
    these are, [n].
    """
    rows = np.arange(len(sets))
    by_set = is_free.reshape(len(sets), 2, SET)
    emptier = by_set.sum(axis=2).argmax(axis=1)
    at = emptier * SET + by_set[rows, emptier].argmax(axis=1)
    full = np.flatnonzero(~is_free[rows, at])
    if len(full):
        at[full] = ages_of(full).argmax(axis=1)
    places = sets[rows, at // SET] * SET + at % SET
    winners = np.zeros(len(sets), dtype=np.bool_)
    winners[np.unique(places, return_index=True)[1]] = True
    return places[winners], winners


def _not_zero(keys: Words) -> Words:
    """Return keys without 0, which marks empty slots."""
    return np.where(keys == 0, np.uint64(1), keys)


def _low(words: Words) -> npt.NDArray[np.uint32]:
    """Return the lower half of each word."""
    return (words & np.uint64(0xFFFFFFFF)).astype(np.uint32)
