"""A block of the device tier as the tiers below see it."""

from __future__ import annotations

from dataclasses import dataclass

from stemma.types import NO_HINT, BlockKey, RetentionHint


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
