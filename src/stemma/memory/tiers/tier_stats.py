"""Counters and gauges of the tiers below the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from stemma.memory.tiers.block_store import ReadResult, StoreCounters
from stemma.types import Tier


@dataclass(slots=True)
class LoadCounters:
    """Results of loads. Written under the queue's lock."""

    num_loads: int = 0
    num_prefetches: int = 0
    loaded_blocks: Counter[Tier] = field(default_factory=Counter)
    prefetched_blocks: Counter[Tier] = field(default_factory=Counter)
    lost_blocks: Counter[tuple[Tier, ReadResult]] = field(default_factory=Counter)
    """Blocks that a tier said it had and didn't deliver; their tokens were computed."""
    num_late_loads: int = 0
    """Loads that reached their time limit; the blocks they lacked were computed."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """One lower tier."""

    counters: StoreCounters
    num_blocks: int | None
    """None: unknown, the tier is shared."""
    capacity_blocks: int | None
    """Blocks that fit, if they shrink like those that are there."""
    stored_bytes: int | None
    """Bytes that the blocks take as they are stored."""
    block_bytes: int
    """Bytes of one block."""
    load_s_per_block: float | None
    """Estimated; None until measured."""
    is_worth_loading: bool
    num_queued_writes: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """All lower tiers."""

    tiers: Mapping[Tier, TierStats]
    loads: LoadCounters
    dropped_writes: Mapping[str, int]
    """Blocks not copied down because staging was full, by reason (`copies_down.py`)."""
    num_waiting_writes: int
    """Blocks of the device that are copied down once staging has room."""
    num_queued_blocks: int
    """Blocks of loads and prefetches that haven't ended: what a further load waits for."""
    compute_s_per_block: float | None
    """Estimated cost of computing a block; nothing is loaded from a slower tier."""
    missing_by_rank: Mapping[int, int] = field(default_factory=dict)
    """On several ranks: blocks that a rank lacked and another had as a prompt asked; they are computed."""
