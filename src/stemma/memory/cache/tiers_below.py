"""The tiers below the device as an operator sees them: what they hold, pins, quotas, what they did.

The step loop asks `PrefixCache`; these calls are for other threads, for they may wait for a store or a pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stemma.memory.tiers.block_store import BlockStore, HeldBlock
from stemma.memory.tiers.lower import LowerTiers
from stemma.memory.tiers.tier_stats import TransferStats
from stemma.prefix.keys import owner_tag
from stemma.types import BlockKey, Tier


class TiersBelow:
    """The tiers of one cache; without any, they hold nothing and have nothing to do. Thread-safe."""

    def __init__(self, lower: LowerTiers | None) -> None:
        self._lower = lower

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """The stores, nearest first."""
        return self._lower.stores if self._lower is not None else ()

    def lookup(self, keys: Sequence[BlockKey]) -> dict[Tier, list[bool]]:
        """Return, per tier, which keys it holds. Asks the pool."""
        return self._lower.lookup(keys) if self._lower is not None else {}

    def lookup_local(self, keys: Sequence[BlockKey]) -> dict[Tier, list[bool]]:
        """Return, per tier of this machine, which keys it holds."""
        return {store.tier: store.exists_many(keys) for store in self.stores if store.is_local}

    def newest(self, max_blocks: int) -> dict[Tier, list[HeldBlock]]:
        """Return, per tier of this machine, the `max_blocks` blocks that entered last."""
        return {store.tier: store.newest(max_blocks) for store in self.stores if store.is_local}

    def pin(self, keys: Sequence[BlockKey]) -> dict[Tier, list[BlockKey]]:
        """Forbid eviction from host and disk (on the device: `hold`); return which blocks each pinned."""
        return self._lower.pin(keys) if self._lower is not None else {}

    def unpin(self, pinned: Mapping[Tier, Sequence[BlockKey]]) -> None:
        """Undo `pin`; takes what it returned."""
        if self._lower is not None:
            self._lower.unpin(pinned)

    def read(self, key: BlockKey, into: memoryview) -> bool:
        """Read a block from the nearest tier that delivers it; return whether one did."""
        return self._lower is not None and self._lower.read(key, into)

    def set_quotas(self, quotas: Mapping[Tier, Mapping[str, int]]) -> None:
        """Set how many blocks each owner (`Namespace.owner`) may hold in each tier. O(blocks)."""
        if self._lower is not None:
            self._lower.set_quotas(
                {tier: {owner_tag(name): n for name, n in owned.items()} for tier, owned in quotas.items()}
            )

    def flush(self) -> dict[Tier, int]:
        """Drop every unpinned block of host and disk, once queued writes are done; return how many."""
        return self._lower.flush() if self._lower is not None else {}

    def drain(self, timeout_s: float) -> bool:
        """Wait until queued writes are done; return whether they are."""
        return self._lower is None or self._lower.drain(timeout_s)

    def stats(self) -> TransferStats | None:
        """Return what the tiers did; None without them."""
        return self._lower.stats() if self._lower is not None else None
