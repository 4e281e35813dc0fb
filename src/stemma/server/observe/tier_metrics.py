"""The tiers below the device, in `/metrics` and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stemma.engine.api import EngineStats
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.tier_stats import TierStats, TransferStats
from stemma.types import Tier

_PER_TIER_COUNTS: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    ("stemma_tier_evicted_blocks", "Blocks dropped to make room", lambda t: t.counters.num_evicted),
    ("stemma_tier_expired_blocks", "Blocks dropped unused", lambda t: t.counters.num_expired),
    ("stemma_tier_read_bytes", "Bytes of blocks read", lambda t: t.counters.read_bytes),
    ("stemma_tier_written_bytes", "Bytes of blocks written", lambda t: t.counters.written_bytes),
)
_PER_TIER_GAUGES: tuple[tuple[str, str, Callable[[TierStats], float | None]], ...] = (
    ("stemma_tier_blocks", "Blocks held", lambda t: t.num_blocks),
    ("stemma_tier_capacity_blocks", "Blocks that fit", lambda t: t.capacity_blocks),
    ("stemma_tier_stored_bytes", "Bytes of the blocks held, as they are stored", lambda t: t.stored_bytes),
    (
        "stemma_tier_unpacked_bytes",
        "Bytes of the same blocks on the device",
        lambda t: None if t.num_blocks is None else t.num_blocks * t.block_bytes,
    ),
    ("stemma_tier_queued_writes", "Blocks waiting to be written", lambda t: t.num_queued_writes),
    ("stemma_tier_load_seconds_per_block", "Measured cost of loading a block", lambda t: t.load_s_per_block),
    (
        "stemma_tier_worth_loading",
        "1 while loading from the tier is predicted to beat computing",
        lambda t: float(t.is_worth_loading),
    ),
)


def tier_metrics(stats: TransferStats) -> Iterable[Metric]:
    """Yield one family per counter and gauge, labelled by tier."""
    for name, text, gauge_of in _PER_TIER_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["tier"])
        for tier, one in stats.tiers.items():
            if (value := gauge_of(one)) is not None:
                gauge.add_metric([tier.value], value)
        yield gauge
    for name, text, count_of in _PER_TIER_COUNTS:
        counter = CounterMetricFamily(name, text, labels=["tier"])
        for tier, one in stats.tiers.items():
            counter.add_metric([tier.value], count_of(one))
        yield counter
    yield from _by_reason(stats)
    yield from _transfers(stats)


def _by_reason(stats: TransferStats) -> Iterable[Metric]:
    reads = CounterMetricFamily("stemma_tier_reads", "Blocks read, by result", labels=["tier", "result"])
    writes = CounterMetricFamily("stemma_tier_writes", "Blocks written, by result", labels=["tier", "result"])
    faults = CounterMetricFamily(
        "stemma_tier_faults", "Why reads and writes failed", labels=["tier", "reason"]
    )
    for tier, one in stats.tiers.items():
        for read in ReadResult:
            reads.add_metric([tier.value, read.value], one.counters.reads.get(read, 0))
        for put in PutResult:
            writes.add_metric([tier.value, put.value], one.counters.puts.get(put, 0))
        for reason, count in sorted(one.counters.reasons.items()):
            faults.add_metric([tier.value, reason], count)
    return (reads, writes, faults)


def _transfers(stats: TransferStats) -> Iterable[Metric]:
    loads = stats.loads
    loaded = CounterMetricFamily("stemma_loaded_blocks", "Blocks moved to the device", labels=["tier"])
    ahead = CounterMetricFamily("stemma_prefetched_blocks", "Blocks moved to the host ahead", labels=["tier"])
    lost = CounterMetricFamily(
        "stemma_lost_blocks", "Blocks a tier promised and didn't deliver", labels=["tier", "result"]
    )
    for tier in (tier for tier in Tier if tier is not Tier.DEVICE):
        loaded.add_metric([tier.value], loads.loaded_blocks.get(tier, 0))
        ahead.add_metric([tier.value], loads.prefetched_blocks.get(tier, 0))
        for result in (one for one in ReadResult if one is not ReadResult.HIT):
            lost.add_metric([tier.value, result.value], loads.lost_blocks.get((tier, result), 0))
    yield from (loaded, ahead, lost)
    for name, text, number in (
        ("stemma_loads", "Loads started for requests", loads.num_loads),
        ("stemma_late_loads", "Loads that reached their time limit", loads.num_late_loads),
        ("stemma_prefetches", "Prompts looked up ahead of their turn", loads.num_prefetches),
    ):
        yield CounterMetricFamily(name, text, value=number)
    dropped = CounterMetricFamily(
        "stemma_dropped_writes", "Blocks not copied down: no room in the transfer buffer", labels=["reason"]
    )
    for reason, count in stats.dropped_writes.items():
        dropped.add_metric([reason], count)
    yield dropped
    yield GaugeMetricFamily(
        "stemma_waiting_writes",
        "Blocks of the device that wait for room in the transfer buffer",
        value=stats.num_waiting_writes,
    )
    yield GaugeMetricFamily(
        "stemma_queued_load_blocks",
        "Blocks of loads and prefetches that haven't ended",
        value=stats.num_queued_blocks,
    )
    if stats.missing_by_rank:
        missing = CounterMetricFamily(
            "stemma_rank_missing_blocks", "Blocks that a rank lacked and another had", labels=["rank"]
        )
        for rank, count in stats.missing_by_rank.items():
            missing.add_metric([str(rank)], count)
        yield missing
    if stats.compute_s_per_block is not None:
        yield GaugeMetricFamily(
            "stemma_compute_seconds_per_block",
            "Measured cost of computing a block: slower tiers aren't loaded from",
            value=stats.compute_s_per_block,
        )


def tiers_as_json(stats: TransferStats) -> dict[str, Any]:
    """Return the same as plain JSON."""
    loads = stats.loads
    return {
        "tiers": {tier.value: _tier_as_json(one) for tier, one in stats.tiers.items()},
        "num_loads": loads.num_loads,
        "num_late_loads": loads.num_late_loads,
        "num_prefetches": loads.num_prefetches,
        "loaded_blocks": {tier.value: n for tier, n in loads.loaded_blocks.items()},
        "prefetched_blocks": {tier.value: n for tier, n in loads.prefetched_blocks.items()},
        "lost_blocks": {f"{tier.value}:{result.value}": n for (tier, result), n in loads.lost_blocks.items()},
        "dropped_writes": dict(stats.dropped_writes),
        "num_waiting_writes": stats.num_waiting_writes,
        "num_queued_blocks": stats.num_queued_blocks,
        "compute_s_per_block": stats.compute_s_per_block,
        "missing_by_rank": {str(rank): n for rank, n in stats.missing_by_rank.items()},
    }


def _tier_as_json(one: TierStats) -> dict[str, Any]:
    counters = one.counters
    return {
        "num_blocks": one.num_blocks,
        "capacity_blocks": one.capacity_blocks,
        "stored_bytes": one.stored_bytes,
        "block_bytes": one.block_bytes,
        "num_queued_writes": one.num_queued_writes,
        "load_s_per_block": one.load_s_per_block,
        "is_worth_loading": one.is_worth_loading,
        "reads": {result.value: n for result, n in counters.reads.items()},
        "writes": {result.value: n for result, n in counters.puts.items()},
        "faults": dict(counters.reasons),
        "num_evicted_blocks": counters.num_evicted,
        "num_expired_blocks": counters.num_expired,
        "read_bytes": counters.read_bytes,
        "written_bytes": counters.written_bytes,
    }


def engine_as_json(stats: EngineStats) -> dict[str, Any]:
    """Return the engine's counters and gauges as plain JSON."""
    shown = asdict(replace(stats, transfer=None))
    if stats.transfer is not None:
        shown["transfer"] = tiers_as_json(stats.transfer)
    shown["cached_tokens_by_tier"] = {t.value: n for t, n in stats.cached_tokens_by_tier.items()}
    return shown
