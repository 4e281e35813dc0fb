"""A block of the device tier as the tiers below see it."""

from __future__ import annotations

from dataclasses import dataclass

from stemma.types import NO_HINT, BlockKey, RetentionHint


@dataclass(frozen=True, slots=True)
class BlockNotes:
    """What a tier keeps with a block's bytes for whoever loads it, who knows its owner by himself."""

    hint: RetentionHint = NO_HINT
    session: int = 0
    """Number of the conversation that left it (`keys.session_number`); 0: none was named."""


NO_NOTES = BlockNotes()


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A device block together with what a lower tier needs to keep it."""

    block_id: int
    key: BlockKey
    parent: BlockKey
    """Key of the block before it, or the root of its namespace."""
    num_tokens: int
    """`block_size`, or fewer in a partial last block."""
    hint: RetentionHint = NO_HINT
    owner: str = ""
    """The `owner_tag` of whose it is, for quotas; empty: nobody's."""
    session: int = 0
    """Number of the conversation that left it; 0: none was named."""
