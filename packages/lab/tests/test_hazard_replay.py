"""hazard on whole traces: better than LRU where the hazard isn't monotone, never much worse."""

from pathlib import Path

import pytest
from packages.lab.tests.agentic import agentic_trace

from stemma_lab.replay import replay
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import collect
from stemma_lab.traces.reader import open_trace

SAMPLE = Path(__file__).parent / "data" / "mooncake_conversation_head.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [300, 1000, 3000])
def test_agentic_sessions(capacity):
    trace = agentic_trace(num_sessions=60, mean_turns=20.0, span_s=900.0)
    lru = replay(trace, "lru", capacity).block_hit_ratio(trace)
    hazard = replay(trace, "hazard", capacity).block_hit_ratio(trace)
    assert hazard > lru - 0.005
    assert hazard <= replay(trace, "min", capacity).block_hit_ratio(trace)


def test_too_little_to_learn_is_lru():
    reader = open_trace(SAMPLE)
    trace = collect("sample", lambda: reader.format.block_size, reader)
    lru, hazard = replay(trace, "lru", 500), replay(trace, "hazard", 500)
    assert hazard.num_hit_blocks.tolist() == lru.num_hit_blocks.tolist()


def test_costs_shift_hits_to_deep_blocks():
    trace = agentic_trace(num_sessions=40, mean_turns=10.0, span_s=600.0)
    model = PrefillModel(attention_equal_at=2_000.0)
    costs = model.block_seconds(int(trace.num_prompt_blocks.max()), trace.block_size)
    plain, by_cost = replay(trace, "hazard", 400), replay(trace, "hazard", 400, costs)
    assert by_cost.prefill_seconds_saved(trace, model) > 0.97 * plain.prefill_seconds_saved(trace, model)
