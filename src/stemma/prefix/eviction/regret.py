"""Regret: would LRU have done better so far? Measured continuously and cheaply on a sample of blocks.

A shadow LRU holds the identities of one block in 2^k, at the real cache's size divided by 2^k (spatial
sampling; Waldspurger et al., FAST'15). The same sampled blocks are counted in the real cache, so the two hit
counts differ only because of the policies. Blocks are sampled individually, not by prompt: leaves-first LRU
keeps prefixes closed by itself.

The learned order is used in trials. Its *regret* is the number of hits by which LRU is ahead in total, with
gains counted up to a limit. The learned order is used while the regret is below a small share of all lookups
plus what chance explains; otherwise LRU is used. The regret of a lost trial is kept, and the next trial waits
until further lookups make it small in proportion. All counts fade at the same rate. So the loss against LRU
is limited to about that share of the lookups, except over short spans.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.records import NO_PRINT
from stemma.types import Fingerprints

_TARGET_SHADOW_BLOCKS = 2048
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MAX_REGRET_SHARE = 0.001
"""Regret, as a share of the lookups, that ends a trial of the learned order."""
_NUM_SIGMAS, _MAX_CHANCE_SHARE, _MAX_CHANCE = 2.0, 0.012, 60.0
"""Tolerance for chance in addition: standard deviations of the regret, limited to this share of the lookups
and to this number of sampled hits. One long prompt may account for most of it."""
_MAX_LEAD_SHARE = 0.1
"""A lead is counted up to this share of the lookups, so that a change of load shows soon."""
_HALF_LIFE = 65_536.0
"""Sampled lookups after which counts have faded by half."""
_STRICTER, _MAX_LOST = 0.75, 8
"""After n lost trials in a row the next waits for regret below `_STRICTER`^n of the limit; n is capped."""


class LRUShadow:
    """Says whether the real cache should fall back to LRU."""

    def __init__(self, num_resident: int, num_lookups: int = 0) -> None:
        """`num_resident` is the size of the real cache, from which the sampling rate follows.

        `num_lookups` blocks were looked up before, while both caches held the same.
        """
        shift = max(0, (max(num_resident, 1) // _TARGET_SHADOW_BLOCKS).bit_length())
        self._rate = 1.0 / (1 << shift)
        self._mask_shift = np.uint64(64 - shift) if shift else None
        self._held: OrderedDict[int, None] = OrderedDict()
        self._num_lookups = min(num_lookups * self._rate, _HALF_LIFE / math.log(2.0))
        """Sampled lookups, faded."""
        self._regret = 0.0
        """Sampled hits by which LRU is ahead, faded."""
        self._variance = 0.0
        """Sum of the squares of each prompt's contribution to the regret, faded."""
        self._trial_lookups = 0
        """Sampled lookups of the current trial."""
        self._num_lost = 0
        """Trials lost in a row."""
        self.prefers_lru = False
        """Whether the real cache should be LRU now."""

    def fill(self, prints: Fingerprints) -> None:
        """Copy the contents of the real cache; the first of `prints` was used last."""
        for identity in reversed(prints[self._sampled(prints)].tolist()):
            self._held[identity] = None

    def look_up(self, prints: Fingerprints, num_hits: int, capacity_blocks: int) -> None:
        """Count a prompt whose first `num_hits` blocks were in the real cache, and mark all as used."""
        places = self._sampled(prints)
        if not len(places):
            return
        held = self._held
        num_shadow_hits = 0
        # The root side is stamped last, so that deeper blocks are evicted first.
        for identity in reversed(prints[places].tolist()):
            if identity in held:
                num_shadow_hits += 1
                held.move_to_end(identity)
            else:
                held[identity] = None
        num_real_hits = int(np.searchsorted(places, num_hits)) if num_hits else 0
        self._count(len(places), num_shadow_hits - num_real_hits)
        capacity = round(capacity_blocks * self._rate)
        while len(held) > capacity:
            held.popitem(last=False)

    def _sampled(self, prints: Fingerprints) -> npt.NDArray[np.int64]:
        """Return the positions of the sampled ones."""
        chosen: npt.NDArray[np.bool_] = prints != NO_PRINT
        if self._mask_shift is not None:
            chosen &= (prints * _MULTIPLIER) >> self._mask_shift == 0
        return np.flatnonzero(chosen)

    def _count(self, num_lookups: int, regret: int) -> None:
        fade = 0.5 ** (num_lookups / _HALF_LIFE)
        self._num_lookups = self._num_lookups * fade + num_lookups
        self._regret = max(self._regret * fade + regret, -_MAX_LEAD_SHARE * self._num_lookups)
        self._variance = self._variance * fade + regret * regret
        chance = min(
            _NUM_SIGMAS * math.sqrt(self._variance), _MAX_CHANCE_SHARE * self._num_lookups, _MAX_CHANCE
        )
        allowed = _MAX_REGRET_SHARE * self._num_lookups + chance
        if self.prefers_lru:
            if self._regret <= allowed * _STRICTER ** min(self._num_lost, _MAX_LOST):
                self.prefers_lru, self._trial_lookups = False, 0
            return
        self._trial_lookups += num_lookups
        if self._regret > allowed:
            self.prefers_lru = True
            self._num_lost = 1 if self._trial_lookups > _HALF_LIFE else self._num_lost + 1
