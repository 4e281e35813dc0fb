"""Log-probabilities of prompts: exact, whatever is cached, cut into chunks or preempted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stemma import LLM, SamplingParams
from stemma.engine.offline import Generation
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.errors import InvalidRequest
from stemma.types import FinishReason

PROMPT = np.random.default_rng(3).integers(5, 90, 75).tolist()
ASKED = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=4)
PLAIN = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, kv_cache_memory="2MB", block_size=16)


def test_they_are_those_of_transformers(llm, checkpoint):
    [found] = llm.generate(PROMPT, ASKED)
    assert found.prompt_logprobs is not None
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference(torch.tensor([PROMPT])).logits[0, :-1], dim=-1)
    own = logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])
    assert found.prompt_logprobs.token_ids.tolist() == PROMPT
    np.testing.assert_allclose(found.prompt_logprobs.logprobs, own[:, 0].numpy(), atol=2e-4)
    ranks = 1 + (logprobs > own).sum(dim=-1).numpy()
    assert (np.abs(found.prompt_logprobs.ranks - ranks) <= 1).all()
    top = torch.topk(logprobs, 4).values.numpy()
    np.testing.assert_allclose(found.prompt_logprobs.top_logprobs, top, atol=2e-4)


def test_a_cached_prompt_is_computed_and_gives_the_same_bits(llm):
    [cold] = llm.generate(PROMPT, ASKED)
    answer = llm.generate(PROMPT, PLAIN)[0].completions[0].token_ids
    [again] = llm.generate(PROMPT, ASKED)
    assert (again.cache.num_cached_tokens, again.cache.miss_reason) == (0, "recomputed")
    assert again.completions[0].token_ids == answer
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        one, other = getattr(cold.prompt_logprobs, name), getattr(again.prompt_logprobs, name)
        np.testing.assert_array_equal(one, other)
    assert llm.generate(PROMPT, PLAIN)[0].cache.num_cached_tokens == len(PROMPT) - 1
    llm.engine.check()


def scores_of(one: Generation) -> PromptLogprobs:
    assert one.prompt_logprobs is not None
    return one.prompt_logprobs


def test_chunks_and_neighbours_change_nothing(llm, checkpoint):
    [whole] = llm.generate(PROMPT, ASKED)
    small = LLM(checkpoint, kv_cache_memory="2MB", block_size=16, max_batch_tokens=16)
    prompts = [PROMPT, PROMPT[:40], PROMPT, [7, *PROMPT]]
    found = small.generate(prompts, [ASKED, PLAIN, ASKED, ASKED])
    expected = scores_of(whole)
    for one in (found[0], found[2]):
        np.testing.assert_array_equal(scores_of(one).logprobs, expected.logprobs)
        np.testing.assert_array_equal(scores_of(one).top_ids, expected.top_ids)
    assert found[1].prompt_logprobs is None
    assert len(scores_of(found[3]).logprobs) == len(PROMPT)


def test_a_preempted_prompt_goes_on_where_it_was(harness):
    """Four prompts in a cache that holds two: some yield while their positions are scored."""
    engine = harness(num_blocks=14, block_size=8, max_batch_tokens=16)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
    prompts = [[n, *PROMPT[:40]] for n in range(11, 15)]
    ids = [engine.add(prompt, params) for prompt in prompts]
    engine.run(check=True)
    assert engine.engine.stats().num_preemptions > 0
    alone = harness(num_blocks=64, block_size=8)
    for request_id, prompt in zip(ids, prompts, strict=True):
        expected = alone.serve(prompt, params).prompt_logprobs
        assert expected is not None
        found = engine.answers[request_id].prompt_logprobs
        np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_no_step_holds_more_logits_than_allowed(checkpoint, monkeypatch):
    monkeypatch.setattr("stemma.engine.core.engine.num_scored_rows", lambda vocab_size, most: 9)
    llm = LLM(checkpoint, kv_cache_memory="2MB", block_size=16)
    seen: list[int] = []
    forward = llm.engine.runner.forward

    def spy(plan):
        logits = forward(plan)
        seen.append(len(logits))
        return logits

    monkeypatch.setattr(llm.engine.runner, "forward", spy)
    [found] = llm.generate(PROMPT, ASKED)
    assert max(seen) <= 10
    assert found.prompt_logprobs is not None


def test_the_prompt_alone(llm):
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, n=2)
    [found] = llm.generate(PROMPT, params)
    assert found.prompt_logprobs is not None
    assert found.prompt_logprobs.top_ids.shape == (len(PROMPT) - 1, 0)
    assert [(c.token_ids, c.finish_reason) for c in found.completions] == [([], FinishReason.LENGTH)] * 2
    with pytest.raises(InvalidRequest, match="max_tokens"):
        SamplingParams(max_tokens=0)
    assert llm.generate([5], SamplingParams(max_tokens=0, prompt_logprobs=3))[0].prompt_logprobs is not None
    llm.engine.check()


def test_too_many_values_are_refused(llm, monkeypatch):
    monkeypatch.setattr("stemma.engine.core.validation.MAX_REPORTED_VALUES", 300)
    with pytest.raises(InvalidRequest, match="prompt tokens are more than 300"):
        llm.generate(PROMPT, ASKED)


def test_steps_that_overlap(harness):
    plain, ahead = harness(), harness(overlaps=True)
    expected, found = plain.serve(PROMPT, ASKED).prompt_logprobs, ahead.serve(PROMPT, ASKED).prompt_logprobs
    assert expected is not None
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
