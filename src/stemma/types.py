"""Names that every layer shares: array aliases, identifiers, tiers, finish reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray: TypeAlias = npt.NDArray[np.int32]
"""Token ids, shape [num_tokens], int32, C-contiguous."""

BlockIds: TypeAlias = npt.NDArray[np.int32]
"""Physical block numbers of one tier, shape [num_blocks], int32."""

Fingerprints: TypeAlias = npt.NDArray[np.uint64]
"""Identity of blocks across evictions (the first 8 bytes of their keys), shape [num_blocks]."""

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: the chained SHA-256 that names a block and everything before it (`prefix/keys.py`)."""


DEFAULT_PRIORITY = 50
"""Priority of blocks whose request gives none."""
MAX_PRIORITY = 100
MAX_TTL_S = 100 * 365 * 86400.0
"""Maximum time to live. It fits every stored format; it means "never"."""


@dataclass(frozen=True, slots=True)
class RetentionHint:
    """How firmly, and how long, blocks should stay: what eviction policies may follow.

    Hints come from clients: values out of range are clamped here, once for all tiers.
    """

    priority: int = DEFAULT_PRIORITY
    """0 (goes first) to 100 (stays longest)."""
    ttl_s: float | None = None
    """After this many seconds without use they go before anything else; None: no such time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority", min(max(self.priority, 0), MAX_PRIORITY))
        if self.ttl_s is not None:
            ttl_s = None if math.isnan(self.ttl_s) else min(max(self.ttl_s, 0.0), MAX_TTL_S)
            object.__setattr__(self, "ttl_s", ttl_s)


NO_HINT = RetentionHint()


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """The hint of a prompt's leading tokens, as far as no range before it covers them.

    A block has the hint of the range that its first token lies in.
    """

    num_tokens: int
    """Leading tokens of the prompt, so ranges ascend."""
    hint: RetentionHint


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention hints of one request."""

    rest: RetentionHint = NO_HINT
    """The hint of the blocks that no range covers."""
    ranges: tuple[RetentionRange, ...] = ()
    renews: bool = False
    """Blocks that were cached before get the hints as well; else those of whom they came with stay."""


NO_RETENTION = Retention()


class Tier(StrEnum):
    """Where a block's bytes lie, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    POOL = "pool"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def as_tokens(tokens: object) -> TokenArray:
    """Turn a list or array of ints into a contiguous int32 array (no copy if it is one already)."""
    return np.ascontiguousarray(tokens, dtype=np.int32)
