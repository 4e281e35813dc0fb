"""The contract between the prefix cache and the tiers below the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from stemma.memory.kv_events import KVEventSink
from stemma.memory.tiers.block_store import BlockStore
from stemma.memory.tiers.device_block import NO_NOTES, BlockNotes, DeviceBlock
from stemma.memory.tiers.loads import Prefetch
from stemma.memory.tiers.tier_stats import TransferStats
from stemma.types import BlockKey, Tier


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Blocks that a lower tier has and that are not loaded."""

    num_blocks: int
    tier: Tier
    """Tier of the first one."""
    is_awaited: bool
    """False: requests don't wait for this tier. True: computing is predicted to be faster."""


class LowerTiers(Protocol):
    """The tiers of one engine: `TierTransfer`, or those of several ranks as one."""

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """All stores, nearest first."""

    @property
    def must_probe(self) -> bool:
        """Whether a tier is too slow for `match` to ask: then each prompt needs a `prefetch` first."""

    def watch(self, sink: KVEventSink) -> None:
        """Tell `sink` of blocks that enter and leave the stores of this process."""

    def match(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        """Return the tiers of the leading keys that are worth loading; ends at the first miss.

        Counts as a use in the host tier, so that making room for this load doesn't evict the blocks it is
        about to load.
        """

    def held(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        """Return the tiers of the leading keys that requests may wait for, worth loading or not."""
        return self.match(keys)

    def gain_s(self, tiers: Sequence[Tier], num_tokens: int) -> float:
        """Return the seconds saved by loading blocks of these tiers if `num_tokens` needn't be computed then.

        Only their order counts where loading is wanted anyway.
        """
        return float(num_tokens)

    def choose(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        """Count a use of blocks that `held` found and that are loaded now; return where they came from."""
        return self.held(keys)

    def passed_over(self, keys: Sequence[BlockKey]) -> PassedOver | None:
        """Return what the tiers have of `keys`, which `match` left out; None if not even the first."""

    def notes(self, keys: Sequence[BlockKey]) -> Sequence[BlockNotes]:
        """Return what blocks came with, as far as a tier knows."""
        return [NO_NOTES] * len(keys)

    def load(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], num_spared: int | None = None
    ) -> Future[int]:
        """Copy each key's bytes into its device block.

        `num_spared`: blocks of a prompt that needn't be computed then; None: as many as are loaded. The
        result is how many leading blocks arrived; a failure is a smaller number, or StorageError if the
        policy is to fail the request. Until then the blocks stay reserved.
        """

    def load_ahead(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int]
    ) -> tuple[Future[int], Callable[[], None]]:
        """As `load`, for nobody who waits; also return what ends it early with the blocks that have arrived.

        Where the tiers can't end it, that does nothing.
        """
        return self.load(keys, block_ids), lambda: None

    def prefetch(
        self, parent: BlockKey, keys: Sequence[BlockKey], owners: Sequence[str] = ()
    ) -> Prefetch | None:
        """Find the blocks of a queued prompt, and promote them while it waits.

        `parent` comes before the first key. `owners`: whose they are (`owner_tag`); none: nobody's. None if
        there is nothing to do before `match`.
        """

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Report that a step took `seconds` to compute `num_tokens` prompt tokens: loads must be faster."""

    def on_commit(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks entered the device index (for write-through)."""

    def on_hit(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks of the device index were used again (for selective write-through, and for recency)."""

    def on_renew(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks of the device index have other hints now, which hold for their copies below too."""
        return None

    def on_evict(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks leave the device index. Their bytes are intact until this returns (for write-back)."""

    def on_drop(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks left the device index and aren't demoted: it was flushed."""
        return None

    def copy_waiting(self) -> bool:
        """Copy down what found no room before; return whether something waits still. For idle time."""
        return False

    def set_quotas(self, quotas: Mapping[Tier, Mapping[str, int]]) -> None:
        """Set how many blocks each owner (`owner_tag`) may hold in each tier, also in a pool attached later.

        O(blocks), so not for the step loop.
        """

    def lookup(self, keys: Sequence[BlockKey]) -> dict[Tier, list[bool]]:
        """Return, per tier, which keys it holds. Asks the pool, so not for the step loop."""

    def pin(self, keys: Sequence[BlockKey]) -> dict[Tier, list[BlockKey]]:
        """Forbid eviction from host and disk; return which blocks each held and pinned, for `unpin`."""

    def unpin(self, pinned: Mapping[Tier, Sequence[BlockKey]]) -> None:
        """Undo `pin`; takes what it returned."""

    def read(self, key: BlockKey, into: memoryview) -> bool:
        """Read a block of `block_bytes` from the nearest tier that delivers it; return whether one did."""

    def flush(self) -> dict[Tier, int]:
        """Drop every unpinned block of host and disk; return how many were dropped. A shared pool is kept."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until queued writes are done; return whether they are."""

    def stats(self) -> TransferStats:
        """Return counters and gauges of all tiers."""

    def check(self) -> None:
        """Raise IntegrityError if a local tier is inconsistent (slow)."""

    def close(self) -> None:
        """Write what is queued, end all threads and close the stores. A second call does nothing."""
