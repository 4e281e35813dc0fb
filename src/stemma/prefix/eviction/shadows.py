"""Two simulated caches say whether the learned order or LRU would do better: the real one follows the leader.

Both hold one block in 2^k, at the real cache's size divided by 2^k (spatial sampling; Waldspurger et al.,
FAST'15). One evicts by LRU, the other by the learned order. Neither depends on what the real cache does, so
an order that loses does so in a simulation only.

LRU keeps prefixes closed by itself. For the learned order each block knows its nearest sampled ancestor, and
only blocks without held descendants are evicted.

What counts is the time to compute what one shadow holds and the other lacks. The learned order's *lead* is
the sum of these differences, faded. It goes live once the lead is more than chance explains, and LRU is back
as soon as the lead is lost. A lead counts up to a limit, so that a change of load shows soon.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.records import NO_PRINT, RecordTable
from stemma.prefix.eviction.reuse_model import ReuseModel
from stemma.types import Fingerprints

Int32 = npt.NDArray[np.int32]

_TARGET_BLOCKS = 1024
"""A shadow holds fewer blocks, but at least half as many. A smaller cache of half as many blocks leaves
out every second one too, since shadows cost most for each block there (docs/explanation/eviction.md)."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SLACK = 32
"""Both shadows evict once they hold a 32nd too much: ranks are computed for many blocks at once."""
_HALF_LIFE = 32_768.0
"""Sampled lookups after which counts have faded by half."""
_NUM_SIGMAS = 0.5
"""The lead that goes live, in standard deviations of the lead."""
_MIN_SHARE = 0.005
"""The least lead that goes live, as a share of LRU's misses: less isn't worth what a change of load costs."""
_MAX_SIGMAS = 2.0
"""A lead counts up to so many standard deviations."""


class Shadows:
    """Says whether the real cache should use the learned order."""

    def __init__(self, table: RecordTable, model: ReuseModel, num_resident: int) -> None:
        """`num_resident` is the size of the real cache, from which the sampling rate follows."""
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._learned = LearnedShadow(table, model)
        self._table = table
        shift = max(num_resident >= _TARGET_BLOCKS // 2, (num_resident // _TARGET_BLOCKS).bit_length())
        self._rate = 1.0 / (1 << shift)
        self._mask_shift = np.uint64(64 - shift) if shift else None
        self._missed = 0.0
        """Cost of LRU's misses, faded."""
        self._lead = 0.0
        """Cost of the hits by which the learned order is ahead, faded."""
        self._variance = 0.0
        """Sum of the squares of each prompt's contribution to the lead, faded."""
        self.learned_leads = False
        """Whether the real cache should use the learned order now."""

    def fill(self, records: Int32) -> None:
        """Copy the contents of the real cache; the first of `records` was used last."""
        for record in records[self._sampled(self._table.prints[records])].tolist()[::-1]:
            identity = self._table.prints.item(record)
            self._lru[identity] = None
            self._learned.use(identity, record, -1)

    def look_up(self, records: Int32, capacity_blocks: int, now: float) -> None:
        """Count a prompt, given by the records of its blocks from the root, and mark all as used."""
        prints = self._table.prints[records]
        places = self._sampled(prints)
        if not len(places):
            return
        identities = prints[places].tolist()
        costs = self._table.costs[records[places]].tolist()
        before = -1
        gained = missed = 0.0
        lru, learned = self._lru, self._learned
        for identity, record, cost in zip(identities, records[places].tolist(), costs, strict=True):
            if identity in learned:
                gained += cost
            if identity in lru:
                gained -= cost
            else:
                missed += cost
            learned.use(identity, record, before)
            before = identity
        # The root side is stamped last, so that deeper blocks are evicted first.
        for identity in reversed(identities):
            lru[identity] = None
            lru.move_to_end(identity)
        self._count(len(places), missed, gained)
        capacity = max(1, round(capacity_blocks * self._rate))
        if len(lru) > capacity + capacity // _SLACK:
            while len(lru) > capacity:
                lru.popitem(last=False)
        if len(learned) > capacity + capacity // _SLACK:
            learned.evict(len(learned) - capacity, now)

    def _sampled(self, prints: Fingerprints) -> npt.NDArray[np.int64]:
        """Return the positions of the sampled ones."""
        chosen: npt.NDArray[np.bool_] = prints != NO_PRINT
        if self._mask_shift is not None:
            chosen &= (prints * _MULTIPLIER) >> self._mask_shift == 0
        return np.flatnonzero(chosen)

    def _count(self, num_lookups: int, missed: float, gained: float) -> None:
        fade = 0.5 ** (num_lookups / _HALF_LIFE)
        self._missed = self._missed * fade + missed
        self._variance = self._variance * fade + gained * gained
        sigma = math.sqrt(self._variance)
        self._lead = min(self._lead * fade + gained, _MAX_SIGMAS * sigma)
        if self.learned_leads:
            self.learned_leads = self._lead >= 0.0
        else:
            self.learned_leads = self._lead > max(_NUM_SIGMAS * sigma, _MIN_SHARE * self._missed)


class LearnedShadow:
    """A sample of the blocks that a cache would hold under the learned order."""

    def __init__(self, table: RecordTable, model: ReuseModel) -> None:
        self._table, self._model = table, model
        self._record: dict[int, int] = {}
        """Identity -> its record, which may have been dropped and given to another block since."""
        self._parent: dict[int, int] = {}
        """Identity -> its nearest sampled ancestor; -1 if it has none, or it isn't known yet."""
        self._num_children: dict[int, int] = {}
        """Identity -> held blocks that have it as parent, if there are any."""

    def __len__(self) -> int:
        return len(self._record)

    def __contains__(self, identity: int) -> bool:
        return identity in self._record

    def use(self, identity: int, record: int, parent: int) -> None:
        """Hold a block, whose parent is held."""
        self._record[identity] = record
        if parent >= 0 and self._parent.get(identity, -1) < 0:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
            self._parent[identity] = parent
        else:
            self._parent.setdefault(identity, parent)

    def evict(self, num_blocks: int, now: float) -> None:
        """Drop so many blocks of the lowest value, leaves first."""
        inner = self._num_children
        leaves = [identity for identity in self._record if identity not in inner]
        heap = list(zip(self._values(leaves, now), leaves, strict=True))
        heapify(heap)
        for _ in range(num_blocks):
            identity = heappop(heap)[1]
            del self._record[identity]
            parent = self._parent.pop(identity)
            if parent < 0:
                continue
            inner[parent] -= 1
            if not inner[parent]:
                del inner[parent]
                heappush(heap, (self._values([parent], now)[0], parent))

    def _values(self, identities: list[int], now: float) -> list[float]:
        table = self._table
        records = np.array([self._record[identity] for identity in identities], dtype=np.int32)
        ages_s = np.maximum(now - table.used_s[records], 0.0)
        values = self._model.values_of(table.classes[records], ages_s) * table.costs[records]
        values[table.prints[records] != np.array(identities, dtype=np.uint64)] = 0.0
        found: list[float] = values.tolist()
        return found
