"""Structured output, bias and forbidden words through the whole engine, with drafts and in batches."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engine.harness import greedy, prompt

from stemma.engine.sampling.constraints import Constraints, keep_allowed
from stemma.engine.sampling.grammar import GrammarSpec, GrammarState
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import InvalidRequest
from stemma.types import FinishReason

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
OBJECT = GrammarSpec("json_schema", json.dumps(SCHEMA))
DIGITS = GrammarSpec("regex", "[0-9]{3}-[0-9]{2}")


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_random_model_writes_what_the_grammar_says(harness, overlaps, temperature):
    engine = harness(num_blocks=64, overlaps=overlaps)
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=3, grammar=OBJECT, ignore_eos=True)
    answer = engine.serve(prompt(1, 20), params)
    assert set(json.loads(answer.text[0])) == {"city", "sunny"}
    assert answer.finish[0] is FinishReason.STOP


def test_each_of_n_answers_follows_the_grammar_on_its_own(harness):
    engine = harness(num_blocks=64)
    answer = engine.serve(prompt(2, 20), SamplingParams(n=4, max_tokens=40, seed=1, grammar=DIGITS))
    assert all(re.fullmatch("[0-9]{3}-[0-9]{2}", text) for text in answer.text.values())
    assert len(set(answer.text.values())) > 1


def test_min_tokens_dont_outlast_the_grammar(harness):
    engine = harness(num_blocks=64)
    answer = engine.serve(prompt(2, 20), SamplingParams(max_tokens=60, min_tokens=50, grammar=DIGITS))
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", answer.text[0])


def test_drafts_change_nothing_and_keep_to_the_grammar(harness):
    plain = harness(num_blocks=64)
    drafting = harness(num_blocks=64, speculation="tree")
    params = SamplingParams(max_tokens=120, temperature=0.0, grammar=OBJECT)
    expected = plain.serve(prompt(5, 30), params).token_ids[0]
    for _ in range(3):
        assert drafting.serve(prompt(5, 30), params).token_ids[0] == expected


def test_free_and_structured_requests_share_a_batch(harness):
    engine = harness(num_blocks=128)
    free = engine.serve(prompt(7, 20), greedy(12)).token_ids[0]
    engine = harness(num_blocks=128)
    a = engine.add(prompt(7, 20), greedy(12))
    b = engine.add(prompt(8, 20), SamplingParams(max_tokens=60, temperature=0.0, grammar=OBJECT))
    engine.run()
    assert engine.answers[a].token_ids[0] == free
    json.loads(engine.answers[b].text[0])


def test_a_grammar_that_cant_be_compiled_is_refused_before_anything_runs(harness):
    engine = harness(num_blocks=64)
    with pytest.raises(InvalidRequest) as caught:
        engine.serve(
            prompt(1, 20), replace(greedy(4), grammar=GrammarSpec("regex", "(", param="guided_regex"))
        )
    assert caught.value.param == "guided_regex"


def test_bias_allowed_ids_and_bad_words(harness):
    engine = harness(num_blocks=64)
    tokens = prompt(9, 20)
    plain = engine.serve(tokens, greedy(8)).token_ids[0]

    favoured = engine.serve(tokens, replace(greedy(4), logit_bias=((77, 1e4),))).token_ids[0]
    assert favoured == [77] * 4
    only = engine.serve(tokens, replace(greedy(6), allowed_token_ids=(100, 101))).token_ids[0]
    assert set(only) <= {100, 101}
    without = engine.serve(tokens, replace(greedy(8), bad_words=((plain[0],),))).token_ids[0]
    assert plain[0] not in without
    pair = engine.serve(tokens, replace(greedy(8), bad_words=(tuple(plain[:2]),))).token_ids[0]
    assert pair[0] == plain[0]
    assert pair[1] != plain[1]
    assert engine.serve(tokens, greedy(8)).token_ids[0] == plain


def test_bad_words_count_in_drafts_too(harness):
    tokens = np.tile(prompt(4, 5), 6)
    plain = harness(num_blocks=64).serve(tokens, greedy(10)).token_ids[0]
    params = replace(greedy(10), bad_words=(tuple(plain[2:4]),))
    expected = harness(num_blocks=64).serve(tokens, params).token_ids[0]
    drafting = harness(num_blocks=64, speculation="tree")
    drafting.serve(tokens, greedy(10))
    assert drafting.serve(tokens, params).token_ids[0] == expected


def test_rules_that_leave_no_token_are_ignored(harness):
    engine = harness(num_blocks=64)
    params = replace(greedy(3), allowed_token_ids=(100,), bad_words=((100,),))
    assert engine.serve(prompt(1, 20), params).token_ids[0] == [100] * 3


@pytest.mark.parametrize("speculation", ["off", "tree"])
def test_masks_are_computed_while_the_model_runs(harness, monkeypatch, speculation):
    """The step loop asks no grammar for a mask, drafts or not; with a bias the ready mask is used too."""
    engine = harness(num_blocks=128, speculation=speculation)
    params = SamplingParams(max_tokens=120, temperature=0.0, grammar=OBJECT)
    biased = replace(params, logit_bias=((77, 3.0),))
    expected = [engine.serve(prompt(5, 30), one).token_ids[0] for one in (params, biased)]
    computed_in = set()
    prepare = Constraints.prepare

    def spy(self, masks):
        computed_in.add(threading.current_thread().name)
        prepare(self, masks)

    def refuse(self, ahead=()):
        raise AssertionError("a mask was computed on the step loop")

    monkeypatch.setattr(Constraints, "prepare", spy)
    monkeypatch.setattr(GrammarState, "allowed", refuse)
    ids = [engine.add(prompt(5, 30), one) for one in (params, biased)]
    engine.run()
    assert [engine.answers[i].token_ids[0] for i in ids] == expected
    assert all(name.startswith("stemma-masks") for name in computed_in)
    assert computed_in


def test_a_ready_mask_is_the_grammars_own():
    allowed = np.random.default_rng(0).random((3, 77)) < 0.3
    packed = np.packbits(allowed, axis=1, bitorder="little")
    logits = torch.arange(3 * 77, dtype=torch.float32).reshape(3, 77)
    found = keep_allowed(logits, list(packed)).numpy()
    np.testing.assert_array_equal(found, np.where(allowed, logits.numpy(), -np.inf))
    assert logits[2, 76] == 3 * 77 - 1
