"""In which order should waiting requests be served? Replay with a service-time model.

One server computes prompts one after the other; a prompt takes the time of what isn't cached
(`savings.PrefillModel`), and decoding is not modelled. Whenever the server is free the order picks among the
oldest waiting requests, as the engine does:

* `fcfs`: who came first;
* `longest-prefix`: most cached tokens first (SGLang's `lpm`; arXiv 2312.07104). Starves what shares nothing;
* `dfs-weight`: depth first through the cached prefixes on which requests wait, the branch with most of them
  first (SGLang's `dfs-weight`);
* `ageing`: Stemma's: longest prefix first among those that arrived within `ageing_s` after the oldest. This
  is the engine's own code.

In a batch (all arrive at once) depth-first order has the most hits if the cache holds the longest prompt; so
an unlimited cache gives the optimum that hit ratios are compared with.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from stemma.engine.core.ordering import MAX_MATCHED, order_longest_prefix
from stemma.errors import ConfigError
from stemma_lab.replay import Progress, TraceCache, replay
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace

ORDERS = ("fcfs", "longest-prefix", "dfs-weight", "ageing")


@dataclass(frozen=True, slots=True)
class QueueServer:
    """The simulated server."""

    capacity_blocks: int
    policy: str
    prefill: PrefillModel
    ageing_s: float = 5.0


@dataclass(frozen=True, slots=True)
class OrderResult:
    """Hits and waiting times under one order."""

    order: str
    block_hit_ratio: float
    share_of_optimal: float
    """Share of the hits of an unlimited cache."""
    wait_s: npt.NDArray[np.float64]
    """From arrival to the start of service, shape [num_requests]."""
    busy_s: float
    """Time spent computing."""

    @property
    def wait_mean_s(self) -> float:
        """Mean waiting time."""
        return float(self.wait_s.mean())

    @property
    def wait_p99_s(self) -> float:
        """99th percentile of waiting: starvation shows here."""
        return float(np.quantile(self.wait_s, 0.99))

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "order": self.order,
            "block_hit_ratio": self.block_hit_ratio,
            "share_of_optimal": self.share_of_optimal,
            "wait_mean_s": self.wait_mean_s,
            "wait_p99_s": self.wait_p99_s,
            "busy_s": self.busy_s,
        }


class _Waiting:
    """A waiting request in the shape that `engine/core/ordering.py` sorts."""

    __slots__ = ("age", "arrival", "request", "was_preempted")

    def __init__(self, request: int, arrival: float) -> None:
        self.request = request
        self.age: tuple[int, int] = (request, 0)
        self.arrival = arrival
        self.was_preempted = False


def replay_order(
    trace: Trace, order: str, server: QueueServer, time_scale: float = 1.0, progress: Progress | None = None
) -> OrderResult:
    """Serve the trace in one order. Arrival times are multiplied by `time_scale`; 0 makes one batch.

    Raises ConfigError for an unknown order.
    """
    if order not in ORDERS:
        raise ConfigError(f"unknown order {order!r}; known: {', '.join(ORDERS)}")
    arrivals = trace.timestamps_s * time_scale
    cache = TraceCache(server.policy, server.capacity_blocks)
    arriving = deque(_Waiting(number, now) for number, now in enumerate(arrivals.tolist()))
    waiting: dict[int, _Waiting] = {}
    wait_s = np.zeros(trace.num_requests)
    num_hits, busy_s, now = 0, 0.0, 0.0
    while arriving or waiting:
        if not waiting:
            now = max(now, arriving[0].arrival)
        while arriving and arriving[0].arrival <= now:
            one = arriving.popleft()
            waiting[one.request] = one
        chosen = _choose(order, trace, cache, waiting, server.ageing_s).request
        del waiting[chosen]
        wait_s[chosen] = now - arrivals[chosen]
        num_hit = cache.serve(
            trace.blocks_of(chosen), now, trace.conclusion_of(chosen), trace.session_of(chosen)
        )
        num_hit = min(num_hit, int(trace.num_prompt_blocks[chosen]))
        num_hits += num_hit
        length = int(trace.input_tokens[chosen])
        cached = min(num_hit * trace.block_size, max(0, length - 1))
        took_s = float(server.prefill.seconds(cached, length))
        busy_s += took_s
        now += took_s
        if progress is not None:
            progress(1)
    optimal = int(replay(trace, server.policy, None).num_hit_blocks.sum())
    return OrderResult(
        order,
        num_hits / max(1, trace.num_looked_up_blocks),
        num_hits / max(1, optimal),
        wait_s,
        busy_s,
    )


def _choose(
    order: str, trace: Trace, cache: TraceCache, waiting: dict[int, _Waiting], ageing_s: float
) -> _Waiting:
    """Return the request to serve next; `waiting` is in order of arrival."""
    if order == "fcfs" or len(waiting) == 1:
        return next(iter(waiting.values()))
    oldest = list(islice(waiting.values(), MAX_MATCHED))
    cached = {one.request: cache.num_cached(trace.blocks_of(one.request)) for one in oldest}
    if order == "dfs-weight":
        return _first_depth_first(trace, oldest, cached)
    patience_s = ageing_s if order == "ageing" else float("inf")
    return order_longest_prefix(oldest, lambda one: cached[one.request], patience_s)[0]


def _first_depth_first(trace: Trace, oldest: list[_Waiting], cached: dict[int, int]) -> _Waiting:
    """Return the request that a depth-first walk meets first, heaviest branches first.

    Nodes are the ends of cached prefixes; a node weighs as many requests as wait on it or below it.
    """
    ends = {int(trace.blocks_of(r)[num - 1]) for r, num in cached.items() if num}
    paths: dict[int, tuple[int, ...]] = {}
    weights: dict[tuple[int, ...], int] = {}
    for one in oldest:
        head = trace.blocks_of(one.request)[: cached[one.request]].tolist()
        path = paths[one.request] = tuple(block for block in head if block in ends)
        for length in range(len(path) + 1):
            weights[path[:length]] = weights.get(path[:length], 0) + 1

    def rank(one: _Waiting) -> tuple[list[tuple[int, int]], int]:
        path = paths[one.request]
        steps = [(-weights[path[: length + 1]], path[length]) for length in range(len(path))]
        # Requests that wait on a node itself come after those below it.
        return [*steps, (1, 0)], one.request

    return min(oldest, key=rank)
