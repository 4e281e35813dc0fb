"""A budget of thinking through the whole engine: its end is forced at the same place with drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.harness import prompt

from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.thinking import ThinkingTokens
from stemma.errors import InvalidRequest

END, BREAK = 300, 301
OPEN = ThinkingTokens((299,), END, (BREAK, END, BREAK), is_open=True)
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, thinking=OPEN, max_thinking_tokens=5)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_is_forced_at_the_budget(harness, overlaps, temperature):
    engine = harness(num_blocks=64, overlaps=overlaps)
    params = replace(PARAMS, temperature=temperature, seed=3)
    free = engine.serve(prompt(1, 20), replace(params, max_thinking_tokens=None)).token_ids[0]
    bound = engine.serve(prompt(1, 20), params).token_ids[0]
    assert bound[:5] == free[:5]
    assert bound[5:8] == [BREAK, END, BREAK]
    assert len(bound) == 16


def test_each_of_n_answers_has_its_own_budget(harness):
    engine = harness(num_blocks=64)
    answer = engine.serve(prompt(1, 20), replace(PARAMS, n=3, temperature=1.0, seed=1))
    assert [ids[5:8] for ids in answer.token_ids.values()] == [[BREAK, END, BREAK]] * 3


def test_drafts_change_nothing(harness):
    repeating = replace(PARAMS, logit_bias=((11, 1e4),), max_thinking_tokens=9, max_tokens=40)
    expected = [*[11] * 9, BREAK, END, BREAK, *[11] * 28]
    assert harness(num_blocks=64).serve(prompt(1, 20), repeating).token_ids[0] == expected
    drafting = harness(num_blocks=64, speculation="prompt_lookup")
    for _ in range(2):
        assert drafting.serve(prompt(1, 20), repeating).token_ids[0] == expected
    assert drafting.engine.stats().num_accepted_draft_tokens > 0


def test_a_budget_and_other_rules_go_together(harness):
    engine = harness(num_blocks=64)
    params = replace(
        PARAMS,
        min_tokens=16,
        stop_token_ids=(BREAK,),
        bad_words=((END,),),
        repetition_penalty=1.3,
        allowed_token_ids=(11, 12),
    )
    ids = engine.serve(prompt(1, 20), params).token_ids[0]
    assert ids[5:8] == [BREAK, END, BREAK]
    assert set(ids[:5] + ids[8:]) <= {11, 12}


def test_a_token_that_doesnt_exist_is_refused(harness):
    wrong = replace(OPEN, forced_ids=(10**6,))
    with pytest.raises(InvalidRequest, match="token ids"):
        harness(num_blocks=64).serve(prompt(1, 20), replace(PARAMS, thinking=wrong))
    with pytest.raises(InvalidRequest, match="max_thinking_tokens"):
        replace(PARAMS, max_thinking_tokens=-1)
