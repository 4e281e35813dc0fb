"""Regret: would LRU have done better so far? Asked of a sample of blocks, cheaply, all the time.

A shadow LRU holds the identities of one block in 2^k, at the real cache's size divided by 2^k (spatial
sampling; Waldspurger et al., FAST'15). The same sampled blocks are counted in the real cache, so that the two
hit counts differ by the policies alone. Blocks are sampled one by one, not prompt by prompt: leaves-first LRU
keeps prefixes closed by itself.

The learned order is on trial. If LRU gets ahead by more than chance and a small share explain, LRU rules for
a while, each time twice as long; then the next trial begins. So what can be lost to LRU grows with the
logarithm of the trials, plus that small share.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.records import NO_PRINT
from stemma.types import Fingerprints

_TARGET_SHADOW_BLOCKS = 2048
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SLACK_BLOCKS, _MIN_SLACK = 256, 32
"""Hits that a trial of the learned order may lose by chance: of all blocks, and at least of sampled ones."""
_LOSE_SHARE = 0.002
"""What it may lose beyond that, per sampled lookup of the trial."""
_MAX_LEAD_SHARE = 0.02
"""A lead is remembered up to this share of the lookups, so that a change of load shows soon."""
_FIRST_PAUSE, _MAX_PAUSE = 2_000, 128_000
"""Sampled lookups that LRU gets after a lost trial; doubled each time."""


class LRUShadow:
    """Says whether the real cache should fall back to LRU."""

    def __init__(self, num_resident: int) -> None:
        """`num_resident` is the size of the real cache, from which the sampling rate follows."""
        shift = max(0, (max(num_resident, 1) // _TARGET_SHADOW_BLOCKS).bit_length())
        self._rate = 1.0 / (1 << shift)
        self._mask_shift = np.uint64(64 - shift) if shift else None
        self._held: OrderedDict[int, None] = OrderedDict()
        self._slack = max(_MIN_SLACK, round(_SLACK_BLOCKS * self._rate))
        self._regret = 0
        """Sampled hits by which LRU is ahead in the present trial."""
        self._num_lookups = 0
        """Sampled lookups of the present trial."""
        self._next_pause = _FIRST_PAUSE
        self._pause_left = 0

    @property
    def prefers_lru(self) -> bool:
        """Whether the real cache should be LRU now."""
        return self._pause_left > 0

    def look_up(self, prints: Fingerprints, num_hits: int, num_resident: int) -> None:
        """Count a prompt of which the real cache had the first `num_hits` blocks, and use all of them."""
        chosen: npt.NDArray[np.bool_] = prints != NO_PRINT
        if self._mask_shift is not None:
            chosen &= (prints * _MULTIPLIER) >> self._mask_shift == 0
        places = np.flatnonzero(chosen)
        if not len(places):
            return
        held = self._held
        num_shadow_hits = 0
        # The root side is stamped last, so that deeper blocks go first.
        for identity in reversed(prints[places].tolist()):
            if identity in held:
                num_shadow_hits += 1
                held.move_to_end(identity)
            else:
                held[identity] = None
        num_real_hits = int(np.searchsorted(places, num_hits)) if num_hits else 0
        self._count(len(places), num_shadow_hits - num_real_hits)
        capacity = round(num_resident * self._rate)
        while len(held) > capacity:
            held.popitem(last=False)

    def _count(self, num_lookups: int, regret: int) -> None:
        if self._pause_left > 0:
            self._pause_left -= num_lookups
            return
        self._num_lookups += num_lookups
        self._regret = max(self._regret + regret, -round(self._slack + _MAX_LEAD_SHARE * self._num_lookups))
        if self._regret > self._slack + _LOSE_SHARE * self._num_lookups:
            self._pause_left, self._next_pause = self._next_pause, min(2 * self._next_pause, _MAX_PAUSE)
            self._regret = self._num_lookups = 0
