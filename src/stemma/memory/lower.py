"""The seam between the device tier and the tiers below it: what `PrefixCache` asks of them.

`memory/transfer.py` implements it over the block stores. All methods are called on the step loop, so they
must return at once: `load` works in the background and answers through its future.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from stemma.types import BlockKey, Tier


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A device block together with what a lower tier needs to keep it."""

    block_id: int
    key: BlockKey
    parent: BlockKey
    """Key of the block before it, or the root of its namespace."""
    num_tokens: int
    """`block_size`, or fewer in a partial last block."""
    priority: int
    ttl_s: float | None


class LowerTiers(Protocol):
    """Host, disk and pool as one."""

    def match(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        """Return where the leading keys lie that are worth loading; shorter than `keys` at the first miss."""

    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> Future[int]:
        """Copy each key's bytes into its device block. The result is how many leading blocks arrived;
        a failure is a smaller number, never an exception. Until then the blocks stay reserved."""

    def on_commit(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks entered the device index (for write-through)."""

    def on_evict(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks leave the device index. Their bytes are intact until this returns (for write-back)."""
