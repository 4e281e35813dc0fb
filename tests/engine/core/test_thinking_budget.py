"""A budget of thinking through the whole engine: its end is forced at the same place with drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.harness import prompt

from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.thinking import ThinkingMarks, ThinkingTokens
from stemma.errors import InvalidRequest

END, BREAK = 300, 301
SPELLED = {**{token: b"%d " % token for token in range(512)}, 299: b"<t>", END: b"</t>", BREAK: b"\n"}
OPEN = ThinkingTokens(ThinkingMarks(b"<t>", b"</t>", is_open=True), ((BREAK, END, BREAK),) * 4, SPELLED)
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
    wrong = replace(OPEN, forced=((10**6,),) * 4)
    with pytest.raises(InvalidRequest, match="token ids"):
        harness(num_blocks=64).serve(prompt(1, 20), replace(PARAMS, thinking=wrong))
    with pytest.raises(InvalidRequest, match="max_thinking_tokens"):
        replace(PARAMS, max_thinking_tokens=-1)


IN_PIECES = replace(
    OPEN,
    forced=((BREAK, 302, 303, 304), (303, 304), (303, 304), (304,)),
    spelled={**SPELLED, 302: b"</", 303: b"t", 304: b">"},
)
"""No token ends the thinking: three do."""


@pytest.mark.parametrize("speculation", ["off", "prompt_lookup"])
def test_an_end_of_several_tokens_is_finished_where_the_model_began_it(harness, speculation):
    """Nothing but one token is likely here: the one that begins the end."""
    engine = harness(num_blocks=64, speculation=speculation)
    params = replace(PARAMS, thinking=IN_PIECES, logit_bias=((302, 1e4),), max_tokens=24)
    expected = [*[302] * 5, 303, 304, *[302] * 17]
    for _ in range(3):
        assert engine.serve(prompt(1, 20), params).token_ids[0] == expected
    other = replace(
        params, logit_bias=((302, 1e4), (303, 2e4)), bad_words=((303, 303),), max_thinking_tokens=2
    )
    assert engine.serve(prompt(1, 20), other).token_ids[0][:5] == [303, 302, 303, 304, 303]


def test_a_sequence_that_made_room_for_others_has_the_same_end(harness):
    params = replace(PARAMS, thinking=IN_PIECES, max_thinking_tokens=20, max_tokens=36, temperature=1.0)
    roomy, narrow = harness(num_blocks=64), harness(num_blocks=9, block_size=8)
    expected = [roomy.serve(prompt(seed, 20), replace(params, seed=seed)).token_ids for seed in range(3)]
    for seed in range(3):
        narrow.add(prompt(seed, 20), replace(params, seed=seed))
    narrow.run()
    assert [answer.token_ids for answer in narrow.answers.values()] == expected
    assert narrow.engine.stats().num_preemptions > 0
    assert all(ids[20:24] == [BREAK, 302, 303, 304] for answer in expected for ids in answer.values())
