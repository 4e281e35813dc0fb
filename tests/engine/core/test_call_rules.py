"""A grammar behind a text of the answer through the whole engine: free elsewhere, the same with drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.harness import greedy, prompt

from stemma.engine.sampling.calls import CallRule, CallRules
from stemma.engine.sampling.grammar import GrammarSpec

END = 300
SPELLED = {token: b"x" for token in range(1024)}
DIGITS = GrammarSpec("regex", "[0-9]{6}", param="tools")
NEVER = CallRules((CallRule(b"<call>", DIGITS),), None, SPELLED)


def rules_behind(token: int, spec: GrammarSpec = DIGITS) -> CallRules:
    """Return rules of what follows `token`, which spells the head."""
    return replace(NEVER, spelled={**SPELLED, token: b"text <call>"}, rules=(CallRule(b"<call>", spec),))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("overlaps", [False, True])
def test_an_answer_is_what_it_was_up_to_the_call_and_its_rule_holds_there(harness, overlaps, temperature):
    engine = harness(num_blocks=64, overlaps=overlaps)
    params = replace(greedy(40), temperature=temperature, seed=3)
    free = engine.serve(prompt(1, 20), params).token_ids[0]
    assert engine.serve(prompt(1, 20), replace(params, calls=NEVER)).token_ids[0] == free
    head = free[9]
    place = free.index(head) + 1
    answer = engine.serve(prompt(1, 20), replace(params, calls=rules_behind(head)))
    bound = answer.token_ids[0]
    assert bound[:place] == free[:place]
    assert len(bound) == 40
    digits = answer.text[0][len(engine.serve(prompt(1, 20), replace(params, max_tokens=place)).text[0]) :]
    assert digits[:6].isdigit()
    assert not digits.isdigit()


def test_drafts_other_requests_and_room_change_nothing(harness):
    params = [
        replace(greedy(60), calls=rules_behind(token), logit_bias=((token, 6.0),)) for token in (40, 50, 60)
    ]
    expected = [
        harness(num_blocks=64).serve(prompt(seed, 30), one).token_ids[0] for seed, one in enumerate(params)
    ]
    for settings in ({"num_blocks": 64, "speculation": "tree"}, {"num_blocks": 14, "block_size": 8}):
        engine = harness(**settings)
        for _ in range(2):
            names = [engine.add(prompt(seed, 30), one) for seed, one in enumerate(params)]
            engine.run()
            assert [engine.answers[name].token_ids[0] for name in names] == expected
        stats = engine.engine.stats()
        assert stats.num_preemptions or stats.num_accepted_draft_tokens


def test_each_of_n_answers_has_its_own_calls(harness):
    params = replace(greedy(30), temperature=1.0, seed=2, logit_bias=((40, 8.0),), calls=rules_behind(40))
    one, many = harness(num_blocks=64), harness(num_blocks=64)
    assert (
        many.serve(prompt(1, 20), replace(params, n=3)).token_ids[0]
        == one.serve(prompt(1, 20), params).token_ids[0]
    )


def test_a_rule_that_cant_be_compiled_leaves_its_calls_free(harness, caplog):
    engine = harness(num_blocks=64)
    free = engine.serve(prompt(1, 20), greedy(20)).token_ids[0]
    wrong = rules_behind(free[3], GrammarSpec("grammar", "start: (", param="tools"))
    assert engine.serve(prompt(1, 20), replace(greedy(20), calls=wrong)).token_ids[0] == free
    assert "stay free" in caplog.text
