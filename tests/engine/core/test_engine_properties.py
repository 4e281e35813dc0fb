"""Whatever the batch, cache, block size, budget and pool: greedy text in fp32 is that of the plain engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.harness import greedy, prompt

from stemma.types import FinishReason

BASES = [prompt(i, 60) for i in range(2)]


@st.composite
def prompts(draw) -> np.ndarray:
    """Prompts that share prefixes of any length, so that they part inside and between blocks."""
    base = BASES[draw(st.integers(0, 1))]
    head = base[: draw(st.integers(1, 60))]
    tail = prompt(draw(st.integers(100, 103)), draw(st.integers(0, 8)))
    return np.concatenate([head, tail])


@st.composite
def configurations(draw) -> dict:
    block_size = draw(st.sampled_from([1, 3, 8, 16, 64]))
    # The longest prompt and its answer just fit into the smallest pool: preemption is common.
    smallest = -(-90 // block_size)
    return {
        "block_size": block_size,
        "num_blocks": smallest + draw(st.integers(0, smallest)),
        "max_batch_tokens": draw(st.sampled_from([3, 16, 50, 2048])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 64])),
        "index": draw(st.sampled_from(["radix", "hash"])),
        "enable_prefix_cache": draw(st.booleans()),
        "order": draw(st.sampled_from(["fcfs", "longest-prefix"])),
        "overlaps": draw(st.booleans()),
    }


@pytest.fixture(scope="module")
def reference(harness):
    plain = harness(num_blocks=4, enable_prefix_cache=False)
    known: dict[bytes, list[int]] = {}

    def answer(tokens: np.ndarray) -> list[int]:
        if tokens.tobytes() not in known:
            known[tokens.tobytes()] = plain.serve(tokens, greedy(16)).token_ids[0]
        return known[tokens.tobytes()]

    return answer


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=configurations(),
    arrivals=st.lists(st.tuples(prompts(), st.integers(1, 16), st.integers(0, 3)), min_size=1, max_size=8),
    aborted=st.sets(st.integers(0, 7), max_size=2),
)
def test_text_depends_on_nothing_but_the_prompt(harness, reference, config, arrivals, aborted):
    engine = harness(**config)
    ids = []
    for i, (tokens, num_tokens, num_steps) in enumerate(arrivals):
        ids.append(engine.add(tokens, greedy(num_tokens)))
        for _ in range(num_steps):
            engine.step()
        if i in aborted:
            engine.abort(ids[i // 2])
        engine.engine.check()
    engine.run()
    for request_id, (tokens, num_tokens, _) in zip(ids, arrivals, strict=True):
        answer = engine.answers[request_id]
        expected = reference(tokens)[:num_tokens]
        if answer.finish[0] is FinishReason.ABORT:
            got = answer.token_ids.get(0, [])
            assert got == expected[: len(got)]
        else:
            assert answer.token_ids[0] == expected
    engine.cache.flush()
    assert engine.cache.stats().num_free_blocks == config["num_blocks"]
