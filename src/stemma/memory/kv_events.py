"""News of the cache for other processes: blocks that a tier stored, and blocks that left it.

A checkpoint of recurrent states or windows is told once it is in the device tier, with the keys of the pieces
that lower tiers keep it in. There each piece is a block, which enters and leaves by itself.
"""

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
class CheckpointStored:
    """A checkpoint entered a tier."""

    pieces: Sequence[BlockKey]
    """Keys of its blocks in lower tiers, at least one; who goes on from there needs all of them."""
    behind: BlockKey
    """Key of the block whose last token it stands behind, of which is told before."""
    tier: Tier = Tier.DEVICE
    """Caches tell of the device tier alone; of lower tiers, who puts pieces together."""

    @property
    def key(self) -> BlockKey:
        """The key that stands for all of it: that of its last piece."""
        return self.pieces[-1]


@dataclass(frozen=True, slots=True)
class BlocksCopied:
    """Blocks entered a lower tier, which knows their keys only."""

    keys: Sequence[BlockKey]
    tier: Tier


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Full blocks, or pieces of checkpoints, left a tier; of the device, checkpoints under their keys."""

    keys: Sequence[BlockKey]
    tier: Tier


KVEvent = BlocksStored | CheckpointStored | BlocksCopied | BlocksRemoved


class KVEventSink(Protocol):
    """Takes events from any thread, perhaps with locks held: returns at once, never raises."""

    def put(self, event: KVEvent) -> None:
        """Pass an event on, or drop it and let the receivers know that some are missing."""


class EventPublisher(KVEventSink, Protocol):
    """Tells other processes."""

    @property
    def endpoint(self) -> str:
        """Where they subscribe."""

    @property
    def replay_endpoint(self) -> str | None:
        """Where they ask for what they missed; None: nowhere."""

    def close(self) -> None:
        """Send what is left, and end."""
