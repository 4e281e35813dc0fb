"""The plan checked against a live engine: predicted device hit ratio within a point of its own counters."""

from pathlib import Path

import numpy as np
import pytest

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.model.files.tiny import write_tiny_model
from stemma.types import Tier
from stemma_lab.plan import TierBytes, Workload, predict
from stemma_lab.replay import replay
from stemma_lab.savings import PrefillModel, Prices
from stemma_lab.served import served_tokens
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.reader import open_trace

NUM_BLOCKS, BLOCK_SIZE = 150, 16


def run_sessions(llm: LLM, num_requests: int) -> None:
    """Conversations that share a system prompt, grow turn by turn, and are too many for the cache."""
    rng = np.random.default_rng(11)
    system = rng.integers(5, 400, 90).tolist()
    history: list[list[int]] = [list(system) for _ in range(9)]
    for _ in range(num_requests):
        session = int(rng.integers(len(history)))
        prompt = history[session] + rng.integers(5, 400, int(rng.integers(20, 90))).tolist()
        if len(prompt) > 700:
            prompt = system + rng.integers(5, 400, 50).tolist()
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        (done,) = llm.generate([prompt], params)
        history[session] = prompt + done.completions[0].token_ids


def read(path: Path) -> Trace:
    reader = open_trace(path)
    return collect("live", lambda: reader.format.block_size, reader)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_predicted_hit_ratio_is_the_servers(tmp_path: Path, policy: str) -> None:
    model = write_tiny_model(tmp_path / "tiny", hidden_size=32, num_layers=1)
    probe = LLM(model, kv_cache_memory="1MB", block_size=BLOCK_SIZE)
    bytes_per_token = probe.engine.cache.capacity_tokens and 10**6 // probe.engine.cache.capacity_tokens
    probe.close()
    trace_path = tmp_path / "trace.jsonl"
    llm = LLM(
        model,
        kv_cache_memory=NUM_BLOCKS * BLOCK_SIZE * bytes_per_token,
        block_size=BLOCK_SIZE,
        eviction=policy,
        record_trace=trace_path,
    )
    run_sessions(llm, 120)
    stats = llm.stats()
    llm.close()

    live = stats.cached_tokens_by_tier[Tier.DEVICE] / stats.num_prompt_tokens
    trace = read(trace_path)
    assert trace.num_requests == 120
    assert int(trace.input_tokens.sum()) == stats.num_prompt_tokens
    workload = Workload(trace, bytes_per_token, PrefillModel(), Prices(), policy, "keep-copy", "all")
    device = TierBytes("device", stats.num_blocks * BLOCK_SIZE * bytes_per_token, float("inf"))
    predicted = predict(workload, [device]).token_hit_ratios[0]
    assert stats.num_evicted_blocks > 100
    assert predicted == pytest.approx(live, abs=0.01)


@pytest.mark.slow
def test_a_replay_knows_what_running_requests_hold(tmp_path: Path) -> None:
    """Eight at a time in a cache for little more: replayed as served, a recording's hits are the server's."""
    model = write_tiny_model(tmp_path / "tiny", hidden_size=32, num_layers=1)
    path = tmp_path / "trace.jsonl"
    sizes = {"kv_cache_memory": "0.9MB", "block_size": BLOCK_SIZE, "max_batch_tokens": 128}
    llm = LLM(model, **sizes, eviction="lru", record_trace=path)
    run_rounds(llm, 25)
    stats = llm.stats()
    llm.close()
    assert stats.num_evicted_blocks > 100

    reader = open_trace(path)
    trace = collect("live", lambda: reader.format.block_size, reader)
    measured = reader.format.measured
    assert measured is not None
    num_tokens = trace.input_tokens.sum()
    live = trace.cached_tokens.sum() / num_tokens
    assert live == stats.cached_tokens_by_tier[Tier.DEVICE] / stats.num_prompt_tokens
    served = served_tokens(trace, measured).sum() / num_tokens
    instant = replay(trace, "lru", measured.capacity_blocks).token_hit_ratio(trace)
    print(f"live {live:.4f}, served {served:.4f}, in an instant {instant:.4f}")
    assert served == pytest.approx(live, abs=0.01)
    assert abs(instant - live) > 0.015


def run_rounds(llm: LLM, num_rounds: int) -> None:
    """Twelve conversations behind one system prompt; eight of them go on in each round, all at once."""
    rng = np.random.default_rng(3)
    system = rng.integers(5, 400, 200).tolist()
    history = [list(system) for _ in range(12)]
    for _ in range(num_rounds):
        chosen = rng.choice(len(history), 8, replace=False).tolist()
        for one in chosen:
            if len(history[one]) > 700:
                history[one] = list(system)
            history[one] = history[one] + rng.integers(5, 400, int(rng.integers(20, 60))).tolist()
        params = [
            SamplingParams(max_tokens=int(rng.integers(4, 40)), temperature=0.0, ignore_eos=True)
            for _ in chosen
        ]
        for one, done in zip(chosen, llm.generate([history[i] for i in chosen], params), strict=True):
            history[one] = history[one] + done.completions[0].token_ids
