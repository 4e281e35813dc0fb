"""The open bench of eviction policies: hits and prefill of each on several traces, with intervals.

A policy sees a trace once. What another hour of the same traffic would give is told by a bootstrap over
sessions (Efron 1979; whole sessions are drawn, since requests of one depend on each other): all policies get
the same draws, so differences have intervals of their own. Traces without sessions are drawn in slices of
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma_lab.replay import ReplayResult, replay
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace
from stemma_lab.traces.version import TraceVersion

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

BASELINE = "lru"
NUM_SAMPLES = 1000
_NUM_SLICES = 60
_TAIL = 2.5
"""Percent left out at each end: intervals hold 95 % of the samples."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value, and where 95 % of the samples lie."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One policy at one size of one trace."""

    trace: TraceVersion
    policy: str
    capacity_blocks: int
    hit_ratio: Interval
    """Hit blocks over looked-up blocks."""
    prefill_s: Interval
    """Seconds of prefill left to compute."""
    saved: Interval
    """Part of LRU's prefill that the policy saves; below 0: it computes more."""
    elapsed_s: float
    """Time that the replay took."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """One policy's sums, by group: shape [num_groups]."""

    hits: Float64
    looked_up: Float64
    left_s: Float64


def sizes_of(trace: Trace, shares: Sequence[float]) -> list[int]:
    """Return cache sizes as shares of the trace's distinct blocks."""
    return sorted({max(1, round(share * trace.num_unique_blocks)) for share in shares})


def bench(
    trace: Trace,
    policies: Sequence[str],
    sizes: Sequence[int],
    model: PrefillModel,
    progress: Callable[[int], None] = lambda num_done: None,
    seed: int = 0,
) -> list[BenchRow]:
    """Return a row for each size and policy; LRU is run beside them. Raises ConfigError for unknown ones.

    `progress` gets the number of policies that ran since it was called.
    """
    groups = groups_of(trace)
    num_groups = int(groups.max()) + 1
    random = np.random.default_rng(seed)
    draws = random.multinomial(num_groups, np.full(num_groups, 1 / num_groups), size=NUM_SAMPLES)
    rows = []
    for size in sizes:
        sums = {}
        elapsed = {}
        for policy in dict.fromkeys((BASELINE, *policies)):
            result = replay(trace, policy, size)
            progress(1)
            sums[policy], elapsed[policy] = _sums(trace, result, groups, model), result.elapsed_s
        for policy in policies:
            intervals = _intervals(sums[policy], sums[BASELINE], draws)
            rows.append(BenchRow(trace.version, policy, size, *intervals, elapsed[policy]))
    return rows


def groups_of(trace: Trace) -> Int64:
    """Return the number of each request's group, from 0: its session, or its slice of time."""
    if (trace.sessions >= 0).all():
        return np.unique(trace.sessions, return_inverse=True)[1].astype(np.int64)
    span = max(float(trace.timestamps_s[-1]), 1e-9)
    slices = np.minimum((trace.timestamps_s / span * _NUM_SLICES).astype(np.int64), _NUM_SLICES - 1)
    return np.unique(slices, return_inverse=True)[1].astype(np.int64)


def _sums(trace: Trace, result: ReplayResult, groups: Int64, model: PrefillModel) -> _Sums:
    left_s = model.seconds(result.hit_tokens(trace), trace.input_tokens)
    return _Sums(
        *(
            np.bincount(groups, weights=one).astype(np.float64)
            for one in (result.num_hit_blocks, trace.num_prompt_blocks, left_s)
        )
    )


def _intervals(mine: _Sums, base: _Sums, draws: Int64) -> tuple[Interval, Interval, Interval]:
    whole = np.ones((1, draws.shape[1]))
    return (
        _interval(lambda w: (w @ mine.hits) / np.maximum(w @ mine.looked_up, 1), whole, draws),
        _interval(lambda w: w @ mine.left_s, whole, draws),
        _interval(lambda w: 1 - (w @ mine.left_s) / np.maximum(w @ base.left_s, 1e-12), whole, draws),
    )


def _interval(value: Callable[[Float64], Float64], whole: Float64, draws: Int64) -> Interval:
    low, high = np.percentile(value(draws.astype(np.float64)), (_TAIL, 100 - _TAIL))
    return Interval(float(value(whole)[0]), float(low), float(high))
