"""What the prefix cache asks of the tiers below the device: of `TierTransfer`, or of several as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from stemma.memory.kv_events import KVEventSink
from stemma.memory.tiers.block_store import BlockStore
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.loads import Prefetch
from stemma.memory.tiers.tier_stats import TransferStats
from stemma.memory.tiers.transfer import PassedOver
from stemma.types import BlockKey, Tier


class LowerTiers(Protocol):
    """See `TierTransfer`, which says what each method does."""

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """All stores of this process, nearest first."""

    @property
    def must_probe(self) -> bool:
        """Whether each prompt needs a `prefetch` before `match`."""

    def watch(self, sink: KVEventSink) -> None:
        """Tell `sink` of blocks that enter and leave."""

    def match(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        """Return the tiers of the leading keys that are worth loading."""

    def passed_over(self, keys: Sequence[BlockKey]) -> PassedOver | None:
        """Return what the tiers have of `keys`, which `match` left out."""

    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> Future[int]:
        """Copy each key's bytes into its device block."""

    def prefetch(
        self, parent: BlockKey, keys: Sequence[BlockKey], owners: Sequence[str] = ()
    ) -> Prefetch | None:
        """Find the blocks of a queued prompt, and promote them while it waits."""

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Report what computing costs."""

    def on_commit(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks entered the device index."""

    def on_hit(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks of the device index were used again."""

    def on_evict(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks leave the device index."""

    def set_quotas(self, quotas: Mapping[Tier, Mapping[str, int]]) -> None:
        """Set how many blocks each owner may hold in each tier."""

    def lookup(self, keys: Sequence[BlockKey]) -> dict[Tier, list[bool]]:
        """Return, per tier, which keys it holds."""

    def pin(self, keys: Sequence[BlockKey]) -> dict[Tier, list[BlockKey]]:
        """Forbid eviction; return what was pinned where."""

    def unpin(self, pinned: Mapping[Tier, Sequence[BlockKey]]) -> None:
        """Undo `pin`."""

    def read(self, key: BlockKey, into: memoryview) -> bool:
        """Read a block; return whether a tier delivered it."""

    def flush(self) -> dict[Tier, int]:
        """Drop every unpinned block; return how many."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until queued writes are done; return whether they are."""

    def stats(self) -> TransferStats:
        """Return counters and gauges."""

    def check(self) -> None:
        """Raise IntegrityError if a tier is inconsistent."""

    def close(self) -> None:
        """Write what is queued and close."""
