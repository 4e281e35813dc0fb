"""Capacity planning: what tiers of these sizes would save, and where the next gigabyte helps most.

Hit ratios come from replaying the trace through the tiers (`lab/tiers.py`). Times are service times without
queueing: computing what missed, plus moving what was hit below the device at the tier's read speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stemma.errors import ConfigError
from stemma_lab.savings import PrefillModel, Prices
from stemma_lab.tiers import Sharing, TierPlan, TierResult, replay_tiers
from stemma_lab.traces.columns import Trace

GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class TierBytes:
    """A tier as the planner sees it."""

    name: str
    capacity_bytes: int
    read_bytes_per_s: float
    """Speed at which its blocks reach the device; infinite for the device itself."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The traffic that is planned for, and how its blocks behave."""

    trace: Trace
    bytes_per_token: int
    prefill: PrefillModel
    prices: Prices
    policy: str
    sharing: Sharing
    admission: str
    packed: float = 1.0
    """Share of its bytes that a block takes below the device."""

    @property
    def block_bytes(self) -> int:
        """Bytes of KV of one block of the trace."""
        return self.bytes_per_token * self.trace.block_size

    def blocks_in(self, capacity_bytes: int, *, is_below: bool) -> int:
        """Return how many blocks of the trace fit, on the device or below it."""
        share = self.packed if is_below else 1.0
        return int(capacity_bytes / (share * self.block_bytes))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted hits, times and cost of a set of tiers."""

    tiers: tuple[TierBytes, ...]
    """By tier."""
    token_hit_ratios: tuple[float, ...]
    block_hit_ratios: tuple[float, ...]
    ttft_mean_s: float
    ttft_p90_s: float
    prefill_s: float
    """Time spent computing prompts, over the whole trace."""
    cost: float
    num_written: tuple[int, ...]

    @property
    def token_hit_ratio(self) -> float:
        """Over all tiers."""
        return sum(self.token_hit_ratios)


@dataclass(frozen=True, slots=True)
class NextGigabyte:
    """The gain of one more gigabyte of a tier."""

    tier: str
    token_hit_gain: float
    prefill_s_saved: float
    ttft_mean_s_saved: float


def predict(workload: Workload, tiers: Sequence[TierBytes]) -> Prediction:
    """Replay the trace through `tiers`, the device first. Raises ConfigError if the device holds no block."""
    capacities = tuple(
        workload.blocks_in(tier.capacity_bytes, is_below=number > 0) for number, tier in enumerate(tiers)
    )
    if not capacities or capacities[0] < 1:
        raise ConfigError(f"the device tier holds no block of {workload.block_bytes:,} bytes")
    kept = [number for number, size in enumerate(capacities) if size > 0]
    plan = TierPlan(
        tuple(capacities[number] for number in kept), workload.policy, workload.sharing, workload.admission
    )
    result = replay_tiers(workload.trace, plan)
    return _judge(workload, tiers, kept, result)


def next_gigabyte(workload: Workload, tiers: Sequence[TierBytes], base: Prediction) -> list[NextGigabyte]:
    """Return what one more gigabyte of each tier brings, best first.

    One gigabyte alone changes little and by chance, so a tier grows by half (at least by a gigabyte), and the
    gain is divided by the gigabytes added.
    """
    gains = []
    for number, tier in enumerate(tiers):
        added_bytes = max(GIGABYTE, tier.capacity_bytes // 2)
        larger = [*tiers]
        larger[number] = replace(tier, capacity_bytes=tier.capacity_bytes + added_bytes)
        more = predict(workload, larger)
        share = GIGABYTE / added_bytes
        gains.append(
            NextGigabyte(
                tier.name,
                share * (more.token_hit_ratio - base.token_hit_ratio),
                share * (base.prefill_s - more.prefill_s),
                share * (base.ttft_mean_s - more.ttft_mean_s),
            )
        )
    return sorted(gains, key=lambda gain: gain.ttft_mean_s_saved, reverse=True)


def curve(
    workload: Workload, tiers: Sequence[TierBytes], number: int, factors: Sequence[float]
) -> list[Prediction]:
    """Return predictions with tier `number` scaled by each factor, the others as they are."""
    points = []
    for factor in factors:
        scaled = [*tiers]
        size = max(workload.block_bytes, int(tiers[number].capacity_bytes * factor))
        scaled[number] = replace(tiers[number], capacity_bytes=size)
        points.append(predict(workload, scaled))
    return points


def _judge(workload: Workload, tiers: Sequence[TierBytes], kept: list[int], result: TierResult) -> Prediction:
    trace = workload.trace
    tokens = np.zeros((trace.num_requests, len(tiers)), dtype=np.int64)
    blocks = np.zeros(len(tiers))
    written = [0] * len(tiers)
    tokens[:, kept] = result.hit_tokens(trace)
    blocks[kept] = result.hit_ratios(trace)
    for place, number in enumerate(kept[1:]):
        written[number] = result.num_written[place]
    ttft, prefill = service_times(workload, tiers, tokens)
    total = int(trace.input_tokens.sum())
    return Prediction(
        tiers=tuple(tiers),
        token_hit_ratios=tuple((tokens.sum(axis=0) / max(1, total)).tolist()),
        block_hit_ratios=tuple(blocks.tolist()),
        ttft_mean_s=float(ttft.mean()),
        ttft_p90_s=float(np.quantile(ttft, 0.9)),
        prefill_s=float(prefill.sum()),
        cost=workload.prices.bill(total, int(tokens.sum())),
        num_written=tuple(written[1:]),
    )


def service_times(
    workload: Workload, tiers: Sequence[TierBytes], hit_tokens: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return seconds to the first token of each request, and the part of it that is computing."""
    computed = workload.prefill.seconds(hit_tokens.sum(axis=1), workload.trace.input_tokens)
    loading = np.zeros(len(computed))
    for number, tier in enumerate(tiers):
        loading += hit_tokens[:, number] * (workload.bytes_per_token / tier.read_bytes_per_s)
    return computed + loading, computed
