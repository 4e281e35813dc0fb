"""Replaying a trace through several replicas: the router that serves, and simulated caches.

Each replica has a cache of its own and computes one prompt after the other, in the order of arrival; a prompt
takes the time of what isn't cached (`savings.PrefillModel`), decoding is not modelled. The router learns of
stored and evicted blocks `event_lag_s` after the prompt was computed; a share `event_loss` of the events
never arrives. Time is scaled so that the replicas are busy for a given share of it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from stemma.errors import ConfigError
from stemma_lab.replay import Progress, TraceCache, replay
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace
from stemma_router.cluster.holdings import Holdings
from stemma_router.cluster.routers import ROUTERS, Placements, RoutedRequest


@dataclass(frozen=True, slots=True)
class Cluster:
    """The simulated replicas and their router."""

    num_replicas: int
    capacity_blocks: int | None
    """Blocks of each replica; None: no limit."""
    policy: str = "lru"
    prefill: PrefillModel = field(default_factory=PrefillModel)
    busy: float = 0.5
    """Share of time that replicas would compute if each prompt computed only what nobody had seen before."""
    event_lag_s: float = 0.0
    event_loss: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """Hits and times under one router."""

    router: str
    policy: str
    num_replicas: int
    capacity_blocks: int | None
    """Blocks of each replica."""
    block_hit_ratio: float
    ttft_s: npt.NDArray[np.float64]
    """From arrival to the end of prefill, shape [num_requests]."""
    imbalance: float
    """Requests of the busiest replica over the mean."""

    @property
    def ttft_mean_s(self) -> float:
        """Mean time to the first token."""
        return float(self.ttft_s.mean())

    @property
    def ttft_p99_s(self) -> float:
        """99th percentile of the time to the first token."""
        return float(np.quantile(self.ttft_s, 0.99))

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "router": self.router,
            "policy": self.policy,
            "num_replicas": self.num_replicas,
            "capacity_blocks": self.capacity_blocks,
            "block_hit_ratio": self.block_hit_ratio,
            "ttft_mean_s": self.ttft_mean_s,
            "ttft_p99_s": self.ttft_p99_s,
            "imbalance": self.imbalance,
        }


def replay_replicas(
    trace: Trace, router: str, cluster: Cluster, progress: Progress | None = None
) -> ClusterResult:
    """Replay the whole trace behind one router. Raises ConfigError for an unknown one."""
    if router not in ROUTERS:
        raise ConfigError(f"unknown router {router!r}; known: {', '.join(ROUTERS)}")
    run = _Run(trace, router, cluster)
    for request, arrival in enumerate((trace.timestamps_s * time_scale(trace, cluster)).tolist()):
        run.serve(request, arrival)
        if progress is not None:
            progress(1)
    num_requests = np.array(run.num_requests, dtype=np.float64)
    return ClusterResult(
        router,
        cluster.policy,
        cluster.num_replicas,
        cluster.capacity_blocks,
        run.num_hits / max(1, trace.num_looked_up_blocks),
        run.ttft_s,
        float(num_requests.max() / max(1.0, num_requests.mean())),
    )


def time_scale(trace: Trace, cluster: Cluster) -> float:
    """Return the factor on arrival times at which the replicas are busy for the share `cluster.busy`."""
    hits = replay(trace, "lru", None).hit_tokens(trace)
    needed_s = float(cluster.prefill.seconds(hits, trace.input_tokens).sum())
    duration_s = float(trace.timestamps_s[-1] - trace.timestamps_s[0])
    if duration_s <= 0.0:
        return 1.0
    return needed_s / (cluster.num_replicas * cluster.busy * duration_s)


class _Run:
    """One replay: caches, the router, and what is on its way to it."""

    def __init__(self, trace: Trace, router: str, cluster: Cluster) -> None:
        self._trace = trace
        self._cluster = cluster
        self._placements = Placements(ROUTERS[router](), cluster.num_replicas, Holdings(secret=0))
        self._random = random.Random(0)
        self._evicted: list[int] = []
        self._caches = [
            TraceCache(cluster.policy, cluster.capacity_blocks, on_evict=self._evicted.extend)
            for _ in range(cluster.num_replicas)
        ]
        self._free_at = [0.0] * cluster.num_replicas
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.num_requests = [0] * cluster.num_replicas
        self.num_hits = 0
        self.ttft_s = np.zeros(trace.num_requests)

    def serve(self, request: int, arrival: float) -> None:
        """Place a request, serve it, and send the events about it on their way."""
        trace, cluster = self._trace, self._cluster
        while self._coming and self._coming[0][0] <= arrival:
            heapq.heappop(self._coming)[2]()
        chain = trace.blocks_of(request)
        num_prompt_blocks = int(trace.num_prompt_blocks[request])
        length = int(trace.input_tokens[request])
        names = chain[:num_prompt_blocks].tolist()
        ask = RoutedRequest(names, length, trace.block_size, head=_scrambled(names))
        replica = self._placements.order(ask)[0]
        placement = self._placements.begin(ask, replica)
        start = max(arrival, self._free_at[replica])
        num_hit = self._caches[replica].serve(chain, start)
        evicted, self._evicted[:] = list(self._evicted), []
        num_cached = min(num_hit, num_prompt_blocks)
        cached = min(num_cached * trace.block_size, max(0, length - 1))
        end = start + float(cluster.prefill.seconds(cached, length))
        self._free_at[replica] = end
        self.num_hits += num_cached
        self.num_requests[replica] += 1
        self.ttft_s[request] = end - arrival
        self._later(end, lambda: self._placements.end(placement))
        stored = chain[num_hit:].tolist()
        holdings = self._placements.holdings
        if stored and self._random.random() >= cluster.event_loss:
            self._later(end + cluster.event_lag_s, lambda: holdings.store(replica, stored))
        if evicted and self._random.random() >= cluster.event_loss:
            self._later(end + cluster.event_lag_s, lambda: holdings.remove(replica, evicted))

    def _later(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (when, next(self._order), call))


def _scrambled(names: list[int]) -> int:
    """Return a number for rendezvous hashing: the trace's dense ids of the first two blocks, mixed."""
    head = (*names[:2], 0, 0)
    return (head[0] * 0x9E3779B97F4A7C15 + head[1] * 0xC2B2AE3D27D4EB4F + 1) & ((1 << 64) - 1)
