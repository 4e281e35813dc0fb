"""The seam between the device tier and the tiers below it: what `PrefixCache` asks of them.

`transfer.py` implements it over the block stores. All methods are called on the step loop, so they
must return at once: `load` works in the background and answers through its future.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from stemma.memory.tiers.block_store import ReadResult, StoreCounters
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


@dataclass(slots=True)
class Prefetch:
    """A look at the lower tiers on behalf of a request that waits in the queue."""

    probe: Future[None]
    """Done when `LowerTiers.match` knows all it can know of the prompt; until then admission may wait."""
    abandon: Callable[[], None]
    """Stop moving blocks to the host tier: the request is admitted, or gone."""


@dataclass(slots=True)
class LoadCounters:
    """What became of loads. Written under the queue's lock."""

    num_loads: int = 0
    num_prefetches: int = 0
    loaded_blocks: Counter[Tier] = field(default_factory=Counter)
    prefetched_blocks: Counter[Tier] = field(default_factory=Counter)
    lost_blocks: Counter[tuple[Tier, ReadResult]] = field(default_factory=Counter)
    """Blocks that a tier said it had and didn't deliver; their tokens were computed."""
    num_late_loads: int = 0
    """Loads given up at their time limit; the blocks they lacked were computed."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """One lower tier."""

    counters: StoreCounters
    num_blocks: int | None
    """None: unknown, the tier is shared."""
    capacity_blocks: int | None
    load_s_per_block: float | None
    """Estimated; None until measured."""
    is_worth_loading: bool
    num_queued_writes: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """All lower tiers."""

    tiers: Mapping[Tier, TierStats]
    loads: LoadCounters
    num_dropped_writes: int
    """Blocks not copied down because staging was full."""
    compute_s_per_block: float | None
    """Estimated cost of computing a block: a tier slower than this isn't loaded from."""


class LowerTiers(Protocol):
    """Host, disk and pool as one."""

    @property
    def must_probe(self) -> bool:
        """Whether a tier is too far away for `match` to ask: then each prompt needs a `prefetch` first."""

    def match(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        """Return where the leading keys lie that are worth loading; shorter than `keys` at the first miss."""

    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> Future[int]:
        """Copy each key's bytes into its device block. The result is how many leading blocks arrived; a
        failure is a smaller number, or StorageError where that shall fail the request. Until then the blocks
        stay reserved."""

    def prefetch(self, parent: BlockKey, keys: Sequence[BlockKey]) -> Prefetch | None:
        """A prompt was queued: find its blocks, and bring them nearer while it waits. `parent` comes before
        the first key. None if there is nothing to be done ahead of `match`."""

    def on_hit(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks of the device index were used again (for selective write-through, and for recency)."""

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step took so long to compute this many prompt tokens: what a hit has to beat."""

    def on_commit(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks entered the device index (for write-through)."""

    def stats(self) -> TransferStats:
        """Return counters and gauges."""

    def close(self) -> None:
        """Finish queued writes, as far as a time limit allows, and let go of everything."""

    def on_evict(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks leave the device index. Their bytes are intact until this returns (for write-back)."""
