"""Names that every layer shares: array aliases, identifiers, tiers, finish reasons."""

from __future__ import annotations

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
"""Retention hint of blocks whose request gives none; 0 goes first, 100 last."""


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """A retention hint of a prompt's leading tokens, as far as no range before it covers them.

    A block has the hint of the range that its first token lies in.
    """

    num_tokens: int
    """Leading tokens of the prompt, so ranges ascend."""
    priority: int = DEFAULT_PRIORITY
    ttl_s: float | None = None


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
