"""Answers of the operator's commands to the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stemma.types import Tier


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """Where the tokens of a prompt lie. Nothing was computed or moved to find out."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Leading tokens that some tier has: what a request would not have to compute, if all were loaded."""
    served_by_tier: Mapping[Tier, int]
    """The same, each token counted for the nearest tier that has it."""
    tokens_by_tier: Mapping[Tier, int]
    """Tokens that lie in each tier; a token may lie in several."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that may not be evicted."""

    pin_id: str
    num_prompt_tokens: int
    tokens_by_tier: Mapping[Tier, int]
    """Tokens pinned in each tier."""
    ttl_s: float | None
    """Seconds it was pinned for; None: until `unpin`."""


@dataclass(frozen=True, slots=True)
class FlushReport:
    """The result of a flush."""

    freed_blocks: Mapping[Tier, int]
    kept_blocks: Mapping[Tier, int]
    """Blocks that requests or pins hold."""
    block_bytes: int

    @property
    def freed_bytes(self) -> int:
        """Bytes that are free now and weren't before."""
        return sum(self.freed_blocks.values()) * self.block_bytes
