"""Which evicted blocks are worth writing to the tier below.

Most blocks are used once. A small lower tier gains by taking only blocks that were used again; a large one
loses by it, since a block's first reuse may come from there. `AdaptiveAdmission` measures this: it simulates
two shadows of the tier on a sample of blocks (spatial sampling; Waldspurger et al., FAST'15). One takes all
blocks, the other only reused ones. The shadow that would serve more lookups decides. This is set dueling
(Qureshi et al., ISCA'07) on samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import ClassVar

_MULTIPLIER = 0x9E3779B97F4A7C15
_TARGET_SHADOW_BLOCKS = 1024
_FADE = 0.9995
"""Factor by which a shadow's lead fades per sampled lookup."""
_SWITCH_LEAD = 8.0
"""Lead, in sampled hits, that is needed to switch."""


class TierAdmission(ABC):
    """Decides whether an evicted block moves one tier down. Blocks are named by a 64-bit identity."""

    name: ClassVar[str]

    @abstractmethod
    def admits(self, identity: int, num_uses: int) -> bool:
        """Say whether a block that was used `num_uses` times, its first computation included, moves down."""

    def looked_up(self, identity: int) -> None:
        """Record a lookup of a block in the tier. Does nothing unless the admission learns."""
        return None


class AdmitAll(TierAdmission):
    """Every evicted block moves down."""

    name: ClassVar[str] = "all"

    def admits(self, identity: int, num_uses: int) -> bool:
        """Return True."""
        return True


class AdmitReused(TierAdmission):
    """Blocks that were used once don't move down."""

    name: ClassVar[str] = "reused"

    def admits(self, identity: int, num_uses: int) -> bool:
        """Return whether the block was used again."""
        return num_uses > 1


class AdaptiveAdmission(TierAdmission):
    """All or only reused blocks, whichever currently serves more."""

    name: ClassVar[str] = "adaptive"

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks`: the tier that is written to and all tiers below it, together."""
        shift = max(0, (max(capacity_blocks, 1) // _TARGET_SHADOW_BLOCKS).bit_length())
        self._sample_shift = 64 - shift
        self._capacity = max(1, capacity_blocks >> shift)
        self._all: OrderedDict[int, None] = OrderedDict()
        self._reused: OrderedDict[int, None] = OrderedDict()
        self._lead_of_all = 0.0
        self.takes_all = True

    def admits(self, identity: int, num_uses: int) -> bool:
        """Return the better shadow's decision, and enter the block in the shadows that take it."""
        if self._is_sampled(identity):
            self._enter(self._all, identity)
            if num_uses > 1:
                self._enter(self._reused, identity)
        return self.takes_all or num_uses > 1

    def looked_up(self, identity: int) -> None:
        """Count which shadow would have had the block."""
        if not self._is_sampled(identity):
            return
        in_all, in_reused = identity in self._all, identity in self._reused
        for shadow, has in ((self._all, in_all), (self._reused, in_reused)):
            if has:
                shadow.move_to_end(identity)
        self._lead_of_all = self._lead_of_all * _FADE + in_all - in_reused
        if abs(self._lead_of_all) > _SWITCH_LEAD:
            self.takes_all = self._lead_of_all > 0

    def _is_sampled(self, identity: int) -> bool:
        return (identity * _MULTIPLIER & (1 << 64) - 1) >> self._sample_shift == 0

    def _enter(self, shadow: OrderedDict[int, None], identity: int) -> None:
        shadow[identity] = None
        shadow.move_to_end(identity)
        while len(shadow) > self._capacity:
            shadow.popitem(last=False)


def make_admission(name: str, capacity_blocks: int) -> TierAdmission:
    """Build one by name: `all`, `reused` or `adaptive`. Raises KeyError."""
    if name == AdaptiveAdmission.name:
        return AdaptiveAdmission(capacity_blocks)
    return {AdmitAll.name: AdmitAll, AdmitReused.name: AdmitReused}[name]()


ADMISSIONS = (AdmitAll.name, AdmitReused.name, AdaptiveAdmission.name)
