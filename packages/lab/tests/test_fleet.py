"""The real router before simulated servers: nothing is lost, and a restart costs little."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest
from packages.lab.tests.agentic import agentic_trace
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.errors import ConfigError
from stemma_lab.fleet.caches import RunCache
from stemma_lab.fleet.simulation import FleetRun, FleetSettings, one_cache_hits, simulate
from stemma_lab.fleet.traffic import TenantModel, Traffic, traffic_of
from stemma_lab.fleet.virtual_time import run_in_virtual_time
from stemma_lab.fleet.warm import warm
from stemma_lab.replay import replay
from stemma_lab.savings import PrefillModel

PREFILL = PrefillModel(10_000.0)


def traffic(num_servers: int, blocks: int, *, busy: float = 0.25, seconds: float = 30.0) -> Traffic:
    model = TenantModel(num_tenants=40)
    return model.traffic_at(busy, num_servers, seconds, num_servers * blocks, 0, PREFILL)


def ran(given: Traffic, num_servers: int, blocks: int, **fields) -> FleetRun:
    return simulate(given, FleetSettings(num_servers, blocks, prefill=PREFILL, **fields))


def test_virtual_time_passes_at_once_and_in_order() -> None:
    order = []

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((asyncio.get_running_loop().time(), seconds))

    async def work() -> None:
        await asyncio.gather(sleep(3600.0), sleep(5.0))

    run_in_virtual_time(work())
    assert order == [(5.0, 5.0), (3600.0, 3600.0)]


def test_a_run_cache_evicts_leaves_first_and_the_longest_unused() -> None:
    cache = RunCache(10)
    assert cache.use([0, 1], [4, 4]).stored == [(0, 0, 4), (1, 0, 4)]
    change = cache.use([0, 2], [4, 3])
    assert (change.stored, change.evicted) == ([(2, 0, 3)], [(1, 3, 4)])
    assert cache.num_cached([0, 1], [4, 4]) == 7
    assert cache.use([3], [9]).evicted == [(1, 0, 3), (2, 0, 3), (0, 1, 4)]
    assert cache.pieces == [(0, 0, 1), (3, 0, 9)]


@pytest.mark.parametrize("capacity", [300, 2000, 10**9])
def test_runs_of_a_trace_hit_as_its_blocks_do(capacity: int) -> None:
    trace = agentic_trace(num_sessions=60, mean_turns=8.0)
    ours = one_cache_hits(traffic_of(trace, 0.5, 1, PREFILL), capacity)
    plain = replay(trace, "lru", capacity).hit_tokens(trace) // trace.block_size
    assert ours.sum() == pytest.approx(plain.sum(), rel=2e-3)


def test_warm_caches_are_full_however_few_servers_a_tenant_has() -> None:
    given = TenantModel(num_tenants=100).traffic(10, 1.0, 64 * 1000, 0)
    caches = [RunCache(1000) for _ in range(64)]
    warm(given, caches)
    filled = sum(cache.num_blocks for cache in caches) / (64 * 1000)
    assert filled > 0.9  # 0.86 if a tenant never takes a further server
    holders = Counter(run for cache in caches for run, _, _ in cache.pieces)
    assert max(holders[run] for run in given.earlier.tolist()) == 1


def test_made_up_traffic_is_the_same_for_the_same_seed() -> None:
    one, two = traffic(4, 1000), traffic(4, 1000)
    assert np.array_equal(one.arrivals_s, two.arrivals_s)
    assert np.array_equal(one.run_blocks, two.run_blocks)
    assert (np.diff(one.arrivals_s) >= 0).all()
    chain = one.chain(int(one.prompt_runs[-1]))
    assert chain[0] < 40
    assert sum(one.sizes(chain)) * one.block_size == one.input_tokens[-1]


@pytest.mark.slow
def test_without_faults_all_is_answered_and_hits_are_near_one_cache() -> None:
    given = traffic(4, 3000)
    run = ran(given, 4, 3000)
    assert run.outcomes == {"right": given.num_requests}
    assert run.tries == {"answered": given.num_requests}
    whole = one_cache_hits(given, 4 * 3000).sum() / run.num_prompt_blocks.sum()
    assert whole - 0.08 < run.hit_ratio <= whole + 0.01
    balanced = ran(given, 4, 3000, router="round-robin")
    assert run.hit_ratio > balanced.hit_ratio + 0.1
    again = ran(given, 4, 3000)
    assert np.array_equal(run.ttft_s, again.ttft_s), "the same each time"


def test_sick_servers_of_two_lose_no_request() -> None:
    given = traffic(2, 3000, busy=0.15, seconds=160.0)
    run = ran(given, 2, 3000, faults=1)
    assert run.num_faults == {"hangs": 1, "garbage": 1, "gone": 1, "drains": 1}
    failed = run.outcomes.total() - run.outcomes["right"] - run.outcomes["broken"]
    assert (failed, run.outcomes.total()) == (0, given.num_requests)
    assert run.tries["lost"] + run.tries["late"] > 0, "requests of the hung server were moved"
    assert run.num_ejections > 0
    assert run.num_retries < 0.2 * given.num_requests


@pytest.mark.slow
@pytest.mark.parametrize("at_s", [10.0])
def test_a_restarted_router_knows_the_blocks_again_by_snapshots(at_s: float) -> None:
    given = traffic(4, 3000)
    plain, again = ran(given, 4, 3000), ran(given, 4, 3000, restart_at_s=at_s)
    ready_s = again.snapshots_ready_s
    assert ready_s is not None
    assert ready_s < 1.0
    chosen = given.arrivals_s >= at_s + 5.0
    gap = hit_ratio(plain, chosen) - hit_ratio(again, chosen)
    assert gap < 0.01
    assert again.outcomes == plain.outcomes


@pytest.mark.slow
def test_a_router_without_snapshots_in_time_hits_less() -> None:
    """The other side of the test before: the snapshots are what makes it."""
    given = traffic(4, 3000)
    slow = ran(given, 4, 3000, restart_at_s=5.0, snapshot_blocks_per_s=1.0)
    plain = ran(given, 4, 3000)
    chosen = (given.arrivals_s >= 5.0) & (given.arrivals_s < 15.0)
    assert hit_ratio(slow, chosen) < hit_ratio(plain, chosen) - 0.05


def hit_ratio(run: FleetRun, chosen: Sequence[bool] | np.ndarray) -> float:
    return float(run.num_hit_blocks[chosen].sum() / run.num_prompt_blocks[chosen].sum())


def test_an_index_that_is_too_small_evicts_and_still_answers() -> None:
    given = traffic(4, 3000, seconds=20.0)
    run = ran(given, 4, 3000, index_blocks=4000)
    assert run.num_index_evicted > 0
    assert run.num_index_blocks < 4 * 3000
    assert run.outcomes == {"right": given.num_requests}


def test_an_unknown_router_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache-aware"):
        ran(traffic(1, 100, seconds=1.0), 1, 100, router="nearest")


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    words = ["lab", "fleet", "--servers", "4", "--blocks", "2000", "--tenants", "30", "--seconds", "30"]
    words += ["--fault-s", "1", "--busy", "0.15"]
    result = CliRunner().invoke(make_app(), [*words, "--restart", "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = orjson.loads(file.read_bytes())
    assert report["num_failed"] == 0
    assert report["hit_ratio"] <= report["one_cache_hit_ratio"] + 0.02
    assert report["index_bytes_per_block"] < 32 * 2
    assert set(report["restart"]) == {"at_s", "snapshots_ready_s", "first_5_s", "after_5_s", "num_failed"}
    for words_of in ("hit ratio", "router's CPU", "router restarted", "bytes a block"):
        assert words_of in result.output


def test_the_command_takes_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 100 * n,
            "input_length": 2048,
            "output_length": 5,
            "hash_ids": [0, 1, 2, 3 + n],
        }
        for n in range(30)
    ]
    file.write_bytes(b"\n".join(orjson.dumps(line) for line in lines))
    words = ["lab", "fleet", str(file), "--servers", "2", "--faults", "0"]
    result = CliRunner().invoke(make_app(), words)
    assert result.exit_code == 0, result.output
    assert "30 requests" in result.output
