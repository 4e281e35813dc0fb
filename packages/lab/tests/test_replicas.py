"""Replays through replicas: one replica is a plain replay; ours keeps both the hits and the balance."""

from __future__ import annotations

import pytest
from packages.lab.tests.agentic import agentic_trace

from stemma.errors import ConfigError
from stemma_lab.replay import replay
from stemma_lab.replicas import Cluster, ClusterResult, replay_replicas
from stemma_lab.traces.columns import Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return agentic_trace(num_sessions=120, mean_turns=12.0)


def run(trace: Trace, router: str, num_replicas: int = 4, **fields) -> ClusterResult:
    return replay_replicas(trace, router, Cluster(num_replicas, 2000, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("router", ["cache-aware", "prefix-affinity"])
def test_one_replica_is_a_plain_replay(trace: Trace, router: str) -> None:
    expected = replay(trace, "lru", 2000).num_hit_blocks.sum() / trace.num_looked_up_blocks
    assert run(trace, router, 1).block_hit_ratio == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_hits_as_of_one_large_cache_and_waits_no_longer_than_least_loaded(trace: Trace) -> None:
    whole = replay(trace, "lru", 8000).num_hit_blocks.sum() / trace.num_looked_up_blocks
    ours, balanced = run(trace, "cache-aware"), run(trace, "least-loaded")
    assert ours.block_hit_ratio > whole - 0.02
    assert ours.block_hit_ratio > balanced.block_hit_ratio + 0.2
    assert ours.ttft_p99_s <= balanced.ttft_p99_s


@pytest.mark.slow
def test_late_and_lost_events_cost_little(trace: Trace) -> None:
    ours = run(trace, "cache-aware").block_hit_ratio
    assert run(trace, "cache-aware", event_lag_s=5.0).block_hit_ratio > ours - 0.03
    assert run(trace, "cache-aware", event_loss=0.1).block_hit_ratio > ours - 0.1
    assert (
        run(trace, "cache-aware", event_loss=1.0).block_hit_ratio > run(trace, "round-robin").block_hit_ratio
    )


def test_an_unknown_router_is_refused(trace: Trace) -> None:
    with pytest.raises(ConfigError, match="cache-aware"):
        run(trace, "nearest")
