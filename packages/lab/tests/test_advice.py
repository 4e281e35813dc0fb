"""Advice is followed, and the gain that it promised appears."""

from __future__ import annotations

import math

import pytest
from packages.lab.tests.agentic import agentic_trace
from packages.lab.tests.traces import trace_of

from stemma_lab.advice import Advice, advise
from stemma_lab.plan import TierBytes, Workload
from stemma_lab.replay import replay
from stemma_lab.savings import PrefillModel, Prices
from stemma_lab.tiers import TierPlan, replay_tiers
from stemma_lab.traces.columns import Trace

KB = 1024
SMALL = 250
"""Blocks that overflow."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return agentic_trace(num_sessions=60, mean_turns=10.0)


def workload_of(trace: Trace, policy: str = "lru") -> Workload:
    return Workload(trace, 1000 * KB, PrefillModel(), Prices(), policy, "keep-copy", "all")


def advice_for(trace: Trace, num_blocks: int, policy: str = "lru", host_blocks: int = 0) -> dict[str, Advice]:
    workload = workload_of(trace, policy)
    tiers = [
        TierBytes("device", num_blocks * workload.block_bytes, math.inf),
        TierBytes("host", host_blocks * workload.block_bytes, 20e9),
    ]
    return {one.topic: one for one in advise(workload, tiers)}


def measured_hits(trace: Trace, policy: str, num_blocks: int) -> float:
    tokens = replay(trace, policy, num_blocks).hit_tokens(trace)
    return float(tokens.sum()) / int(trace.input_tokens.sum())


def size_of(advice: Advice, trace: Trace) -> int:
    """The blocks that the advised setting holds, from its words."""
    from stemma.config.sizes import parse_size

    assert advice.setting is not None
    return parse_size(advice.setting.split(": ")[1].replace(" ", "")) // workload_of(trace).block_bytes


def close(measured: float, promised: float) -> bool:
    return measured == pytest.approx(promised, rel=0.2)


def test_more_memory_brings_what_was_promised(trace: Trace) -> None:
    advice = advice_for(trace, SMALL)["memory"]
    assert advice.hits_after is not None
    before, after = measured_hits(trace, "lru", SMALL), measured_hits(trace, "lru", size_of(advice, trace))
    assert after - before > 0.05
    assert close(after - before, advice.hits_after - advice.hits_before)


def test_more_of_the_advised_tier_brings_what_was_promised(trace: Trace) -> None:
    advice = advice_for(trace, SMALL)["tier"]
    assert advice.setting is not None
    assert advice.hits_after is not None
    size = size_of(advice, trace)
    before = measured_hits(trace, "lru", SMALL)
    if advice.setting.startswith("device"):
        after = measured_hits(trace, "lru", size)
    else:
        tokens = replay_tiers(trace, TierPlan((SMALL, size), "lru", "keep-copy", "all")).hit_tokens(trace)
        after = float(tokens.sum()) / int(trace.input_tokens.sum())
    assert close(after - before, advice.hits_after - advice.hits_before)


def test_another_policy_brings_what_was_promised(trace: Trace) -> None:
    advice = advice_for(trace, SMALL)["policy"]
    assert advice.setting is not None
    assert advice.hits_after is not None
    name = advice.setting.split('"')[1]
    gain = measured_hits(trace, name, SMALL) - measured_hits(trace, "lru", SMALL)
    assert gain > 0.002
    assert close(gain, advice.hits_after - advice.hits_before)


def test_enough_memory_is_called_enough(trace: Trace) -> None:
    found = advice_for(trace, 100_000)
    assert found["memory"].setting is None
    assert "tier" not in found
    assert found["worth"].setting is None
    assert measured_hits(trace, "lru", 200_000) < found["memory"].hits_before + 0.01


def test_prompts_that_share_nothing_want_no_cache() -> None:
    alone = trace_of([[10 * n, 10 * n + 1, 10 * n + 2] for n in range(300)])
    found = advice_for(alone, 100)
    assert list(found) == ["worth"]
    assert found["worth"].setting == "enable_prefix_cache = false"
    assert found["worth"].prefill_s_saved == pytest.approx(0.0)
    assert measured_hits(alone, "lru", 100) == 0.0


def test_prompts_that_begin_differently_are_named() -> None:
    dated = trace_of([[n, 1000, 1001] if n % 2 else [7, 8, 9] for n in range(200)])
    advice = advice_for(dated, 100)["prompts"]
    assert "5" in advice.text
    assert advice.text.startswith("50.")
