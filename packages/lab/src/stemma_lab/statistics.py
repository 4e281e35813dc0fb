"""Statistics of a trace, and where a policy finds its hits: over time, by depth, by turn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stemma_lab.replay import ReplayResult
from stemma_lab.traces.columns import Trace

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RatioSeries:
    """Hit ratio by some property: bin edges or labels, the ratio in each, and how many blocks it rests on."""

    labels: Float64
    ratios: Float64
    num_blocks: Int64


def hit_ratio_over_time(trace: Trace, result: ReplayResult, num_bins: int = 60) -> RatioSeries:
    """Return the block hit ratio in equal slices of time; labels are the slices' starts in seconds."""
    span = max(float(trace.timestamps_s[-1]), 1e-9)
    slices = np.minimum((trace.timestamps_s / span * num_bins).astype(np.int64), num_bins - 1)
    return _series(np.arange(num_bins) * span / num_bins, slices, trace, result)


def hit_ratio_by_depth(trace: Trace, result: ReplayResult) -> RatioSeries:
    """Return how often a prompt block was a hit by its depth in powers of two; labels are block positions."""
    max_depth = int(trace.num_prompt_blocks.max(initial=1))
    edges = np.unique(np.concatenate([[0], 2 ** np.arange(int(np.log2(max_depth)) + 2)])).astype(np.int64)
    lengths, hits = trace.num_prompt_blocks, result.num_hit_blocks.astype(np.int64)
    looked_up = np.array([_between(lengths, low, high) for low, high in pairwise(edges.tolist())])
    found = np.array([_between(hits, low, high) for low, high in pairwise(edges.tolist())])
    return RatioSeries(edges[:-1].astype(np.float64), found / np.maximum(looked_up, 1), looked_up)


def hit_ratio_by_turn(trace: Trace, result: ReplayResult, max_turn: int = 12) -> RatioSeries:
    """Return the block hit ratio by turn; the last label stands for all later turns."""
    turns = np.minimum(infer_turns(trace), max_turn)
    series = _series(np.arange(max_turn + 1, dtype=np.float64), turns, trace, result)
    return RatioSeries(series.labels[1:], series.ratios[1:], series.num_blocks[1:])


def infer_turns(trace: Trace) -> Int64:
    """Return the turn of each request, from 1: as recorded, else from whose blocks it continues.

    A request whose longest seen prefix was first computed by a request of turn t has turn t + 1. Prompts that
    share only a system prompt count it as turn 1, so in such traces conversations start at turn 2.
    """
    if trace.turns.all():
        return trace.turns
    seen = trace.previous_use >= 0
    num_seen = (
        np.add.reduceat(seen, np.minimum(trace.offsets[:-1], max(len(seen) - 1, 0))) if len(seen) else seen
    )
    owner_turn = np.zeros(trace.num_unique_blocks, dtype=np.int64)
    turns = np.ones(trace.num_requests, dtype=np.int64)
    offsets, ids = trace.offsets.tolist(), trace.block_ids
    for request in range(trace.num_requests):
        start, end = offsets[request], offsets[request + 1]
        if start == end:
            continue
        num = int(num_seen[request])
        if num:
            turns[request] = owner_turn[ids[start + num - 1]] + 1
        owner_turn[ids[start + num : end]] = turns[request]
    return turns


@dataclass(frozen=True, slots=True)
class ReuseDistances:
    """How much passes between two uses of a block."""

    edges_blocks: Int64
    """Edges of the bins, shape [num_bins + 1]: distinct blocks used in between."""
    num_blocks: Int64
    """Reuses in each bin."""
    num_first_uses: int
    """Uses of blocks never seen before: no cache can serve them."""
    gap_edges_s: Float64
    num_by_gap: Int64
    """Reuses by the time since the previous use."""


def reuse_distances(trace: Trace) -> ReuseDistances:
    """Return the histogram of LRU stack distances (what a cache must hold to hit) and of reuse times.

    The stack distance counts distinct blocks since the previous use, by a Fenwick tree over positions
    (Bennett and Kruskal, 1975): O(n log n), done for all reuses of one request at once.
    """
    distances = stack_distances(trace)
    reused = distances >= 0
    top = max(2, int(np.ceil(np.log2(max(2, int(distances.max(initial=1)))))) + 1)
    edges = np.concatenate([[0], 2 ** np.arange(top)]).astype(np.int64)
    times = trace.timestamps_s[trace.request_of_block]
    gaps = times[reused] - times[trace.previous_use[reused]]
    gap_edges = np.concatenate([[0.0], np.geomspace(1.0, max(2.0, float(gaps.max(initial=1.0)) * 1.001), 40)])
    return ReuseDistances(
        edges_blocks=edges,
        num_blocks=np.histogram(distances[reused], bins=edges)[0],
        num_first_uses=int(np.count_nonzero(~reused)),
        gap_edges_s=gap_edges,
        num_by_gap=np.histogram(gaps, bins=gap_edges)[0],
    )


def stack_distances(trace: Trace) -> Int64:
    """Return for each use the number of distinct blocks used since the block's previous use; -1: first use.

    Uses of one request happen at once, so distances are counted between requests: the blocks of both requests
    and of all in between, each once.
    """
    num = trace.num_blocks
    size = 1 << max(1, (num + 1).bit_length())
    tree = np.zeros(size + 1, dtype=np.int64)
    distances = np.full(num, -1, dtype=np.int64)
    offsets, previous, request_of = trace.offsets.tolist(), trace.previous_use, trace.request_of_block
    num_latest = 0
    for request in range(trace.num_requests):
        start, end = offsets[request], offsets[request + 1]
        before = previous[start:end]
        reused = before[before >= 0]
        if len(reused):
            _fenwick_add(tree, reused + 1, -1)
        _fenwick_add(tree, np.arange(start, end) + 1, 1)
        num_latest += end - start - len(reused)
        if len(reused):
            # Latest uses that lie before the request of the previous use are older than it.
            older = _fenwick_sum(tree, trace.offsets[request_of[reused]])
            distances[start:end][before >= 0] = num_latest - older
    return distances


def _fenwick_add(tree: Int64, positions: Int64, value: int) -> None:
    size = len(tree) - 1
    current = positions.astype(np.int64)
    while len(current):
        np.add.at(tree, current, value)
        current = current + (current & -current)
        current = current[current <= size]


def _fenwick_sum(tree: Int64, positions: Int64) -> Int64:
    current = positions.astype(np.int64)
    totals = np.zeros(len(current), dtype=np.int64)
    while current.any():
        totals += tree[current]
        current = current & (current - 1)
    return totals


def _series(labels: Float64, group: Int64, trace: Trace, result: ReplayResult) -> RatioSeries:
    looked_up = np.bincount(group, weights=trace.num_prompt_blocks, minlength=len(labels)).astype(np.int64)
    hits = np.bincount(group, weights=result.num_hit_blocks, minlength=len(labels))
    return RatioSeries(labels, hits / np.maximum(looked_up, 1), looked_up)


def _between(lengths: npt.NDArray[np.int64], low: int, high: int) -> int:
    """Return how many positions in [low, high) the runs [0, length) cover together."""
    return int((np.minimum(lengths, high) - np.minimum(lengths, low)).sum())
