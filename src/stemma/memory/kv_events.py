"""News of the cache for other processes: blocks that a tier stored, and blocks that left it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stemma.prefix.keys import Namespace
from stemma.types import BlockKey, Tier, TokenArray


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks in one run entered the device tier."""

    keys: Sequence[BlockKey]
    parent: BlockKey | None
    """Key of the block before the first; None at the beginning of a prompt."""
    tokens: TokenArray
    """[len(keys) * block_size]."""
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class BlocksCopied:
    """Blocks entered a lower tier, which knows their keys only."""

    keys: Sequence[BlockKey]
    tier: Tier


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Full blocks left a tier."""

    keys: Sequence[BlockKey]
    tier: Tier


KVEvent = BlocksStored | BlocksCopied | BlocksRemoved


class KVEventSink(Protocol):
    """Takes events from any thread, perhaps with locks held: returns at once, never raises."""

    def put(self, event: KVEvent) -> None:
        """Pass an event on, or drop it and let the receivers know that some are missing."""
