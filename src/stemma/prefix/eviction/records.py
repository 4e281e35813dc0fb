"""RecordTable: the hazard policy's record of each block, from its first use until the record is dropped.

Records survive evictions: a block that returns with the same fingerprint gets its record back. Beyond a
limit, the oldest records of evicted blocks are dropped.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.hint_trust import level_of
from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.reuse_model import OpenLifetimes
from stemma.prefix.eviction.stamped import resized
from stemma.types import NO_HINT, BlockIds, Fingerprints, RetentionHint

NO_PRINT = np.uint64(0)
"""Fingerprint of a block without identity: its record ends when the block leaves."""

GHOSTS_PER_BLOCK = 16
"""Records of evicted blocks kept for each block held: reuse that is further away saves nothing here."""

_FREE, _RESIDENT, _GHOST = 0, 1, 2
MAX_HINTS = 1024


@dataclass(frozen=True, slots=True)
class Hint:
    """Retention hints, rounded so that there are few different ones."""

    level: int
    """What it claims (`hint_trust.py`)."""
    ttl_s: float


_NO_HINT = Hint(level_of(NO_HINT), math.inf)


def max_ghosts_beside(num_blocks: int, most: int) -> int:
    """Return how many evicted blocks are remembered beside so many held ones: `most`, or fewer."""
    return min(most, GHOSTS_PER_BLOCK * num_blocks)


class RecordTable:
    """Arrays by record number. Read and write the public ones; `enter` and `leave` keep the bookkeeping."""

    def __init__(self, max_ghosts: int) -> None:
        self.counts: npt.NDArray[np.int32] = np.zeros(1024, dtype=np.int32)
        """Uses so far."""
        self.used_s: npt.NDArray[np.float64] = np.zeros(1024, dtype=np.float64)
        """Time of the last use."""
        self.classes: npt.NDArray[np.int32] = np.zeros(1024, dtype=np.int32)
        self.queues: npt.NDArray[np.int32] = np.zeros(1024, dtype=np.int32)
        """Class and hints in one number: which queue the block waits in as a candidate."""
        self.depths: npt.NDArray[np.int32] = np.zeros(1024, dtype=np.int32)
        """Position in the prompt, from 0."""
        self.weights: npt.NDArray[np.float64] = np.zeros(1024, dtype=np.float64)
        """Weight of the lifetime in what is learned."""
        self.costs: npt.NDArray[np.float64] = np.ones(1024, dtype=np.float64)
        """Value of a hit."""
        self.users: npt.NDArray[np.int64] = np.zeros(1024, dtype=np.int64)
        """Number of the prompt that used it last."""
        self.pauses: npt.NDArray[np.int8] = np.zeros(1024, dtype=np.int8)
        """Level of that prompt's pause."""
        self.tools: npt.NDArray[np.int32] = np.zeros(1024, dtype=np.int32)
        """Number of the tools that its answer calls; 0: none, or not known."""
        self.hints: npt.NDArray[np.int32] = np.zeros(1024, dtype=np.int32)
        self.left_s: npt.NDArray[np.float64] = np.full(1024, math.inf)
        """Since when its session has gone on elsewhere, of a sample; inf: it hasn't since the last use."""
        self.blocks: BlockIds = np.zeros(1024, dtype=np.int32)
        """Id of each, while it is resident."""
        self.prints: Fingerprints = np.zeros(1024, dtype=np.uint64)
        self._states: npt.NDArray[np.uint8] = np.zeros(1024, dtype=np.uint8)
        self._free: list[int] = list(range(1024))
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        """Fingerprint -> record of an evicted block, oldest eviction first."""
        self._max_ghosts = max_ghosts
        self._dropped: list[tuple[int, float, float]] = []
        self._hint_numbers: dict[Hint, int] = {_NO_HINT: 0}
        self._hint_table: list[Hint] = [_NO_HINT]
        self._hint_levels: npt.NDArray[np.int64] = np.full(MAX_HINTS, _NO_HINT.level, dtype=np.int64)
        self.has_left = False
        """Whether a session ever left any block."""
        self.has_hints = False
        """Whether any block ever had retention hints."""
        self._has_costs = False
        self.num_resident = 0
        self._most_resident = 0

    def enter(
        self, num_blocks: int, traits: BlockTraits, depth: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Make blocks resident, the first at `depth`; return all their records, and the known ones."""
        prints = np.zeros(num_blocks, dtype=np.uint64) if traits.fingerprints is None else traits.fingerprints
        ghosts = self._ghosts
        found = [ghosts.pop(identity, -1) for identity in prints.tolist()] if ghosts else [-1] * num_blocks
        known = [record for record in found if record >= 0]
        num_new = num_blocks - len(known)
        while len(self._free) < num_new:
            self._grow()
        fresh = self._free[len(self._free) - num_new :]
        del self._free[len(self._free) - num_new :]
        self.counts[fresh] = 0
        if known:
            remaining = iter(fresh)
            fresh = [record if record >= 0 else next(remaining) for record in found]
        records = np.asarray(fresh, dtype=np.int32)
        self.prints[records] = prints
        self.depths[records] = np.arange(depth, depth + num_blocks)
        if traits.costs_s is not None or self._has_costs:
            self._has_costs = True
            self.costs[records] = 1.0 if traits.costs_s is None else traits.costs_s
        if self.has_hints or traits.leading or traits.hint != NO_HINT:
            self.rehint(records, traits)
        self._states[records] = _RESIDENT
        self.num_resident += num_blocks
        self._most_resident = max(self._most_resident, self.num_resident)
        return records, np.asarray(known, dtype=np.int32)

    def rehint(self, records: npt.NDArray[np.int32], traits: BlockTraits) -> None:
        """Give blocks the hints of `traits`."""
        self.has_hints = True
        for run in traits.runs(len(records)):
            self.hints[records[run.start : run.end]] = self._hint_number(run.hint)

    def leave(self, record: int, *, remember: bool) -> None:
        """End a residence; the record of a remembered block is dropped once too many others have left."""
        self.num_resident -= 1
        identity = self.prints.item(record)
        if not remember or identity == NO_PRINT or not self._max_ghosts:
            self._drop(record)
            return
        self._states[record] = _GHOST
        twin = self._ghosts.pop(identity, None)
        if twin is not None:
            self._drop(twin)
        self._ghosts[identity] = record
        if len(self._ghosts) > max_ghosts_beside(self._most_resident, self._max_ghosts):
            self._drop(self._ghosts.popitem(last=False)[1])

    def hint(self, number: int) -> Hint:
        """Return the hints of that number."""
        return self._hint_table[number]

    def hint_levels(self, records: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return what the hints of blocks claim; the same shape."""
        return self._hint_levels[self.hints[records]]

    def hinted(self) -> npt.NDArray[np.int32]:
        """Return the records of all blocks with hints, resident or remembered."""
        return np.flatnonzero((self._states != _FREE) & (self.hints > 0)).astype(np.int32)

    def left(self) -> npt.NDArray[np.int32]:
        """Return the records of the blocks, resident or remembered, that have a `left_s`."""
        return np.flatnonzero((self._states != _FREE) & (self.left_s < math.inf)).astype(np.int32)

    def resident(self) -> npt.NDArray[np.int64]:
        """Return the records of all resident blocks."""
        return np.flatnonzero(self._states == _RESIDENT)

    def open_lifetimes(self) -> OpenLifetimes:
        """Return the lifetimes of all blocks that are resident or remembered."""
        records = np.flatnonzero(self._states)
        return OpenLifetimes(self.classes[records], self.used_s[records], self.weights[records])

    @property
    def num_dropped(self) -> int:
        """Lifetimes that the next `take_dropped` returns."""
        return len(self._dropped)

    def take_dropped(self) -> OpenLifetimes:
        """Return the lifetimes dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return OpenLifetimes(
            np.asarray([item[0] for item in dropped], dtype=np.int32),
            np.asarray([item[1] for item in dropped], dtype=np.float64),
            np.asarray([item[2] for item in dropped], dtype=np.float64),
        )

    def _drop(self, record: int) -> None:
        self._dropped.append((self.classes.item(record), self.used_s.item(record), self.weights.item(record)))
        self._states[record] = _FREE
        self._free.append(record)

    def _hint_number(self, hint: RetentionHint) -> int:
        """Return the number of a hint; rounded, since each different one costs a queue per class."""
        if hint == NO_HINT:
            return 0
        ttl_s = math.inf if hint.ttl_s is None else 2.0 ** (math.ceil(4 * math.log2(hint.ttl_s + 0.1)) / 4)
        rounded = Hint(level_of(hint), ttl_s)
        number = self._hint_numbers.get(rounded)
        if number is None:
            if len(self._hint_table) >= MAX_HINTS:
                return 0
            number = self._hint_numbers[rounded] = len(self._hint_table)
            self._hint_table.append(rounded)
            self._hint_levels[number] = rounded.level
        return number

    def _grow(self) -> None:
        size = len(self.counts)
        self._free.extend(range(size, 2 * size))
        for name in (
            "counts",
            "used_s",
            "classes",
            "queues",
            "depths",
            "weights",
            "costs",
            "users",
            "pauses",
            "tools",
            "hints",
            "left_s",
            "blocks",
            "prints",
        ):
            setattr(self, name, resized(getattr(self, name), 2 * size))
        self.costs[size:] = 1.0
        self.left_s[size:] = math.inf
        self._states = resized(self._states, 2 * size)
