"""Whose turn it is to leave, where cached blocks and checkpoints share one memory.

Each kind is ranked by a policy of its own; between the first of both `Checkpoints` decides.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stemma.types import BlockKey, RetentionHint

Turn: TypeAlias = tuple[int, float]
"""What has expired leaves first, then what has the lowest priority; and when it was used last."""


def turn_of(hint: RetentionHint, used_at: float, now: float) -> Turn:
    """Return when it is the turn of what was used then; a smaller first number is sooner."""
    has_expired = hint.ttl_s is not None and now - used_at > hint.ttl_s
    return (-1 if has_expired else hint.priority), used_at


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
