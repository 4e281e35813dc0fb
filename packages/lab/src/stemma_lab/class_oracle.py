"""Bounds for policies that know the true hazard of every class of blocks.

The learned policy (`prefix/eviction/hazard.py`) loses to the clairvoyant bound for two reasons: it has to
learn hazards while it runs, and features don't tell which conversation goes on. These oracles leave out the
first. They sort the lifetimes of the whole trace, future included, into classes as fine as the features
permit: uses so far, end of prompt, length, pause, turn, new blocks, length of the answer. They fit the
hazards once and replay with the Gittins index of `reuse_model.py` as the rank.

* `oracle` ranks a trace by hazards fitted on that same trace. Most classes hold few conversations, so part of
  what it knows is the very future that it replays. A policy that goes by these features can't expect more.
* `oracle-crossed` ranks each half of the conversations by the hazards of the other half. It never sees the
  future of what it ranks: this is what the features are worth to a policy that has nothing left to learn.

A class's own hazard is shrunk towards the product of factors that the learned policy uses, so that a class
that holds two conversations isn't taken at its word.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.reuse_model import (
    AGE_EDGES_S,
    common_hazard,
    compose_hazards,
    gittins_index,
    time_at_risk_s,
)
from stemma_lab.clairvoyant import Hits
from stemma_lab.traces.columns import Trace

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_COUNT_EDGES = (1, 2, 4, 8, 32)
_LENGTH_EDGES = (1, 2, 4, 8, 16, 32, 64)
_PAUSE_EDGES_S = (2.0, 10.0, 30.0, 60.0, 90.0, 150.0, 300.0)
_TURN_EDGES = (1, 2, 3, 4, 5, 6, 7)
_NEW_EDGES = (1, 2, 4, 10, 30)
_OUTPUT_EDGES = (2, 10, 30, 100, 200, 400, 600)
_CONTINUES_SHARE = 0.8
"""A prompt continues the one that used its prefix last if it holds this share of that one's blocks."""
_PRIOR_REUSES = 3.0
"""Weight of the product of factors in the hazard of a class, in reuses of a typical prompt."""


@dataclass(frozen=True, slots=True)
class Classes:
    """Levels of the features of each use of a block (each entry of `Trace.block_ids`)."""

    levels: tuple[Int64, ...]
    conversation: Int64
    """First request of the conversation of each request, shape [num_requests]."""


def replay_class_oracle(trace: Trace, capacity_blocks: int | None, *, crossed: bool) -> Hits:
    """Replay under hazards fitted on the whole trace, or each half of the conversations on the other half.

    `capacity_blocks` None means no limit. O(n log n) for n blocks, and O(prompts present) for each request.
    """
    if not trace.num_blocks:
        return Hits(np.zeros(trace.num_requests, dtype=np.int32))
    features = classify(trace)
    class_ids, members = _number(features.levels)
    if not crossed:
        table = _index_table(trace, class_ids, members, np.ones(trace.num_blocks, dtype=np.bool_))
        return replay_with(trace, capacity_blocks, class_ids, table)
    sides = np.random.default_rng(0).integers(0, 2, trace.num_requests)[features.conversation]
    side = sides[trace.request_of_block]
    tables = [_index_table(trace, class_ids, members, side != which) for which in (0, 1)]
    return replay_with(trace, capacity_blocks, class_ids + len(tables[0]) * side, np.vstack(tables))


def replay_with(trace: Trace, capacity_blocks: int | None, class_ids: Int64, table: Float64) -> Hits:
    """Replay `trace` with ranks from `table`, values by class and age; `class_ids`: of each use."""
    capacity = trace.num_unique_blocks if capacity_blocks is None else capacity_blocks
    cache = _Cache(trace, capacity, class_ids, table)
    hits = np.fromiter(map(cache.serve, range(trace.num_requests)), dtype=np.int32, count=trace.num_requests)
    return Hits(np.minimum(hits, trace.num_prompt_blocks).astype(np.int32))


def classify(trace: Trace) -> Classes:
    """Return the features that are known when a block is used, from the past alone."""
    num_requests, offsets = trace.num_requests, trace.offsets
    lengths = np.diff(offsets)
    last_user = np.full(trace.num_unique_blocks, -1, dtype=np.int64)
    uses = np.zeros(trace.num_unique_blocks, dtype=np.int64)
    counts = np.empty(trace.num_blocks, dtype=np.int64)
    turns = np.ones(num_requests, dtype=np.int64)
    pauses = np.full(num_requests, np.inf)
    num_new = np.empty(num_requests, dtype=np.int64)
    conversation = np.arange(num_requests)
    for request in range(num_requests):
        start, end = int(offsets[request]), int(offsets[request + 1])
        chain = trace.block_ids[start:end]
        num_known = int(np.count_nonzero(uses[chain]))
        num_new[request] = len(chain) - num_known
        if num_known:
            before = int(last_user[chain[num_known - 1]])
            pauses[request] = trace.timestamps_s[request] - trace.timestamps_s[before]
            if num_known >= 2 and num_known + 1 >= _CONTINUES_SHARE * lengths[before]:
                turns[request] = turns[before] + 1
                conversation[request] = conversation[before]
        uses[chain] += 1
        counts[start:end] = uses[chain]
        last_user[chain] = request
    of = trace.request_of_block
    is_end = trace.depth_of_block == lengths[of] - 1
    levels = (
        np.searchsorted(_COUNT_EDGES, counts),
        is_end.astype(np.int64),
        np.searchsorted(_LENGTH_EDGES, lengths)[of],
        np.searchsorted(_PAUSE_EDGES_S, pauses)[of] + np.isinf(pauses)[of],
        np.searchsorted(_TURN_EDGES, turns)[of],
        np.searchsorted(_NEW_EDGES, num_new)[of],
        np.searchsorted(_OUTPUT_EDGES, trace.output_tokens)[of],
    )
    return Classes(levels, conversation)


def _number(levels: tuple[Int64, ...]) -> tuple[Int64, tuple[Int64, ...]]:
    """Number the classes that occur; return each entry's class, and each class's levels."""
    spans = [int(level.max()) + 1 for level in levels]
    packed = np.ravel_multi_index(levels, spans)
    present, class_ids = np.unique(packed, return_inverse=True)
    return class_ids.ravel(), tuple(np.unravel_index(present, spans))


def _index_table(
    trace: Trace, class_ids: Int64, levels: tuple[Int64, ...], counted: npt.NDArray[np.bool_]
) -> Float64:
    """Return the value of each class in each age bin, [num_classes, num_bins], from the entries `counted`."""
    num_bins, num_classes = len(AGE_EDGES_S), len(levels[0])
    times = np.append(trace.timestamps_s, trace.timestamps_s[-1])
    of = trace.request_of_block
    is_reused = trace.next_request < trace.num_requests
    ages = times[trace.next_request] - times[of]
    bins = np.searchsorted(AGE_EDGES_S, ages, side="right") - 1
    lengths = np.diff(trace.offsets)
    weights = 1.0 / np.sqrt(lengths[of])
    cells = class_ids * num_bins + bins

    def total(chosen: npt.NDArray[np.bool_]) -> Float64:
        summed = np.bincount(cells[chosen], weights[chosen], minlength=num_classes * num_bins)
        return np.asarray(summed.reshape(num_classes, num_bins))

    prior = _PRIOR_REUSES * max(float(np.median(lengths)), 1.0) ** 0.5
    reuses = total(counted & is_reused)
    at_risk_s = time_at_risk_s(reuses, total(counted & ~is_reused))
    common = common_hazard(reuses.sum(axis=0), at_risk_s.sum(axis=0), prior)
    composed = compose_hazards(common, levels, reuses, at_risk_s, prior)
    return gittins_index((reuses + prior) / (at_risk_s + prior / composed))


class _Cache:
    """A cache whose rank is the value of class and age.

    The blocks that a request used last are a stretch of its chain, since whoever uses a block uses all before
    it. So a stretch is evicted from its end, and only the ends of stretches are compared.
    """

    def __init__(self, trace: Trace, capacity_blocks: int, class_ids: Int64, table: Float64) -> None:
        self._capacity = capacity_blocks
        self._class_ids, self._table = class_ids, table
        self._times = trace.timestamps_s
        self._starts = trace.offsets
        self._ids: list[int] = trace.block_ids.tolist()
        self._user = [-1] * trace.num_unique_blocks
        """Block -> request that used it last."""
        self._present = bytearray(trace.num_unique_blocks)
        self._num_children = [0] * trace.num_unique_blocks
        """Present blocks behind each block."""
        self._first = np.zeros(trace.num_requests, dtype=np.int64)
        self._end = np.zeros(trace.num_requests, dtype=np.int64)
        """The stretch of a request: places `first` to before `end` of its chain."""
        self._live = np.zeros(0, dtype=np.int64)
        """Requests that may have a stretch."""
        self._num_present = 0

    def serve(self, request: int) -> int:
        """Look a prompt up, enter it and make room; return the hit blocks."""
        start, end = self._starts.item(request), self._starts.item(request + 1)
        chain = self._ids[start:end]
        num_hit = 0
        while num_hit < len(chain) and self._present[chain[num_hit]]:
            self._first[self._user[chain[num_hit]]] = num_hit + 1
            num_hit += 1
        for place, block in enumerate(chain):
            self._user[block] = request
            if place >= num_hit:
                self._present[block] = 1
                self._num_children[block] = 0
                if place:
                    self._num_children[chain[place - 1]] += 1
        self._num_present += len(chain) - num_hit
        self._end[request] = len(chain)
        self._live = np.append(self._live, request)
        if self._num_present > self._capacity:
            self._make_room(self._times.item(request))
        return num_hit

    def _make_room(self, now: float) -> None:
        live = self._live = self._live[self._first[self._live] < self._end[self._live]]
        bins = np.searchsorted(AGE_EDGES_S, now - self._times[live], side="right") - 1
        ends = self._class_ids[self._starts[live] + self._end[live] - 1]
        heap = list(zip(self._table[ends, bins].tolist(), live.tolist(), strict=True))
        heapq.heapify(heap)
        while self._num_present > self._capacity and heap:
            _, request = heapq.heappop(heap)
            self._cut(request)
            place = self._end.item(request) - 1
            if place < 0:
                continue
            block = self._ids[self._starts.item(request) + place]
            user = self._user[block]  # another request, once the whole stretch is gone
            tail = self._starts.item(user) + self._end.item(user) - 1
            if not self._num_children[block] and self._ids[tail] == block:
                age = int(np.searchsorted(AGE_EDGES_S, now - self._times.item(user), side="right")) - 1
                heapq.heappush(heap, (self._table.item(self._class_ids.item(tail), age), user))

    def _cut(self, request: int) -> None:
        """Evict the end of a stretch as far as it is of one class and nothing is behind it."""
        start, first, end = self._starts.item(request), self._first.item(request), self._end.item(request)
        kind = self._class_ids.item(start + end - 1)
        while end > first and self._num_present > self._capacity:
            block = self._ids[start + end - 1]
            if self._num_children[block] or self._class_ids.item(start + end - 1) != kind:
                break
            self._present[block] = 0
            self._num_present -= 1
            end -= 1
            if end:
                self._num_children[self._ids[start + end - 1]] -= 1
        self._end[request] = end
