"""The plan checked against a live engine: predicted device hit ratio within a point of its own counters."""

from pathlib import Path

import numpy as np
import pytest

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.lab.plan import TierBytes, Workload, predict
from stemma.lab.savings import PrefillModel, Prices
from stemma.lab.traces.columns import Trace, collect
from stemma.lab.traces.reader import open_trace
from stemma.model.tiny import write_tiny_model
from stemma.types import Tier

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
