"""Whose turn it is to leave, where cached blocks and checkpoints share one memory.

Each kind is ranked by a policy of its own; between the first of both `checkpoint_goes` decides.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stemma.types import BlockKey, RetentionHint

ACROSS = 2.0
"""So many times as long one kind must have been unused to make room for the other (docs/project/log.md)."""

Turn: TypeAlias = tuple[int, float]
"""What has expired leaves first, then what has the lowest priority; and when it was used last."""


def turn_of(hint: RetentionHint, used_at: float, now: float) -> Turn:
    """Return when it is the turn of what was used then; a smaller first number is sooner."""
    has_expired = hint.ttl_s is not None and now - used_at > hint.ttl_s
    return (-1 if has_expired else hint.priority), used_at


def checkpoint_goes(own: Turn, kv: Turn, now: float, *, serves: bool, for_blocks: bool) -> bool:
    """Return whether it is the turn of the first checkpoint (`own`) before that of the first KV block.

    `serves`: whether a checkpoint stands behind that block; KV without one serves nobody. What is freed lies
    scattered and serves its own kind at once (`for_blocks`: blocks are wanted), the other once a slab is
    empty: so the other kind makes room if it was unused much longer.
    """
    if own[0] != kv[0] or not serves:
        return own[0] < kv[0]
    age_s, age_of_kv_s = now - own[1], now - kv[1]
    return age_s > ACROSS * age_of_kv_s if for_blocks else ACROSS * age_s > age_of_kv_s


class CachedKV(Protocol):
    """The blocks of the index, as far as they share memory with checkpoints."""

    def first(self) -> tuple[BlockKey, Turn] | None:
        """Return the key of the block that goes first, and its turn; None: no block can."""

    def evict(self, num_blocks: int) -> int:
        """Evict up to `num_blocks` blocks, lowest-ranked first; return how many."""

    def charge(self, owner: str, num_blocks: int) -> None:
        """Count to an owner's quota what its checkpoints hold: memory for so many blocks."""

    def owners_over_quota(self) -> list[str]:
        """Return the owners that hold too much."""

    def oldest_of(self, owner: str) -> float | None:
        """Return the last use of the block that an owner over its quota loses first; None: all are in use."""

    def evict_over_quota(self) -> bool:
        """Evict that block of the first such owner; False: there is none."""

    def present(self) -> npt.NDArray[np.bool_]:
        """Return which blocks are in the index, shape [num_blocks]."""
