"""Batches without a server: depth first over all prompts, lazily, in little KV memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma import LLM, SamplingParams
from stemma.engine.depth_first import DepthFirst, token_key, tokens_of
from stemma.errors import InvalidRequest, PromptTooLong
from stemma.types import as_tokens

SHORT = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
NUM_GROUPS, IN_GROUP, SHARED, OWN = 12, 6, 150, 20
GOAL = 0.98


@pytest.fixture(scope="module")
def llm(checkpoint) -> Iterator[LLM]:
    # Room for a few prompts: whatever comes back later than its neighbours was evicted.
    model = LLM(checkpoint, kv_cache_memory="1MB", block_size=16, max_waiting=4, max_num_seqs=3)
    yield model
    model.close()


def grouped_prompts(seed: int = 0) -> list[list[int]]:
    """Return prompts of groups that share a beginning, shuffled."""
    random = np.random.default_rng(seed)
    heads = [random.integers(3, 200, SHARED).tolist() for _ in range(NUM_GROUPS)]
    prompts = [head + random.integers(3, 200, OWN).tolist() for head in heads for _ in range(IN_GROUP)]
    return [prompts[i] for i in random.permutation(len(prompts))]


def num_shared(prompts: list[list[int]]) -> int:
    """Return the tokens that no order and no memory can save more than."""
    ordered, total = sorted(prompts), 0
    for before, one in pairwise(ordered):
        same = next((i for i, (a, b) in enumerate(zip(before, one, strict=False)) if a != b), len(one))
        total += min(same, len(one) - 1)
    return total


def test_hits_are_the_best_possible(llm: LLM) -> None:
    prompts = grouped_prompts()
    found = dict(llm.generate_batch(iter(prompts), SHORT))
    hits = sum(one.cache.num_cached_tokens for one in found.values())
    assert hits >= GOAL * num_shared(prompts)
    assert [found[i].prompt_token_ids.tolist() for i in range(len(prompts))] == prompts
    llm.engine.check()


def test_a_list_of_prompts_runs_in_the_same_order(llm: LLM) -> None:
    prompts = grouped_prompts(seed=1)
    results = llm.generate(prompts, SHORT)
    assert sum(one.cache.num_cached_tokens for one in results) >= GOAL * num_shared(prompts)
    by_batch = dict(llm.generate_batch(prompts, SHORT))
    answers = [one.completions[0].token_ids for one in results]
    assert answers == [by_batch[i].completions[0].token_ids for i in range(len(prompts))]


def test_a_batch_that_is_closed_frees_everything(llm: LLM) -> None:
    batch = llm.generate_batch(grouped_prompts(), SHORT)
    next(batch)
    with pytest.raises(InvalidRequest, match="finish or close"):
        llm.generate("one more", SHORT)
    with pytest.raises(InvalidRequest, match="finish or close"):
        next(llm.generate_batch(["one more"], SHORT))
    batch.close()
    assert not llm.engine.has_work
    llm.engine.check()
    assert llm.generate("one more", SHORT)[0].text


def test_a_bad_prompt_is_told_before_any_runs(llm: LLM) -> None:
    before = llm.stats().num_prompt_tokens
    with pytest.raises(PromptTooLong):
        next(llm.generate_batch([[5, 6], [7] * 100_000], SHORT))
    assert llm.stats().num_prompt_tokens == before
    assert dict(llm.generate_batch([], SHORT)) == {}


@given(st.lists(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=6), max_size=20))
@settings(max_examples=50, deadline=None)
def test_the_order_is_that_of_tokens(prompts: list[list[int]]) -> None:
    order = DepthFirst()
    for number, prompt in enumerate(prompts):
        order.add(number, as_tokens(prompt))
    found = [(tokens.tolist(), number) for number, tokens in order]
    assert found == sorted((prompt, number) for number, prompt in enumerate(prompts))
    order.close()
    for prompt in prompts:
        assert tokens_of(token_key(as_tokens(prompt))).tolist() == prompt
