"""Structured output, bias and forbidden words through the whole engine, with drafts and in batches."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engine.harness import greedy, prompt

from stemma.engine.sampling import grammar_compiler
from stemma.engine.sampling.constraints import Constraints, keep_allowed
from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.grammar_compiler import GrammarCompiler
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


@pytest.mark.parametrize("schema", ["object", "digits"])
def test_forced_tokens_are_drafts_that_hold(harness, schema):
    """Where the grammar leaves no choice, a step gives more than one token; the tokens are the same."""
    grammar = OBJECT if schema == "object" else GrammarSpec("regex", "[0-9]: abcdefghijkl, [0-9]")
    params = SamplingParams(max_tokens=120, temperature=0.0, grammar=grammar)
    plain, drafting = harness(num_blocks=64), harness(num_blocks=64, speculation="prompt_lookup")
    expected = plain.serve(prompt(5, 30), params).token_ids[0]
    assert drafting.serve(prompt(5, 30), params).token_ids[0] == expected
    forced = drafting.engine.stats().drafts_by_source["grammar"]
    assert forced.num_accepted == forced.num_proposed > 0
    assert (
        len(drafting.runner.plans)
        == len(plain.runner.plans) - drafting.engine.stats().num_accepted_draft_tokens
    )


def test_no_mask_is_computed_where_the_likeliest_token_is_allowed(tokenizer, monkeypatch):
    vocab_size = len(tokenizer.transformers_tokenizer)
    masks = []

    def argmax(x, mask):
        masks.append(mask)
        return -1

    monkeypatch.setattr(grammar_compiler, "masked_argmax_function", lambda isa: argmax)
    compiler = GrammarCompiler(tokenizer.transformers_tokenizer, vocab_size, [0])
    one = Constraints(
        SamplingParams(temperature=0.0, grammar=OBJECT), vocab_size, compiler.compile(OBJECT).start()
    )
    brace, digit = (tokenizer.encode(text)[0] for text in ("{", "7"))
    assert one.most_likely(np.zeros(vocab_size, np.float32), [], brace) == brace
    assert not masks
    one.most_likely(np.zeros(vocab_size, np.float32), [brace], digit)
    assert len(masks) == 1


@pytest.mark.parametrize("text", [json.dumps(SCHEMA), '{"type": "object"}'])
def test_the_likeliest_allowed_token_is_that_of_the_mask(tokenizer, text):
    """Whether it is known at once, is forced or takes a mask; also after a draft."""
    rng = np.random.default_rng(1)
    vocab_size = len(tokenizer.transformers_tokenizer)
    compiler = GrammarCompiler(tokenizer.transformers_tokenizer, vocab_size, [0])
    grammar = GrammarSpec("json_schema", text)
    params = SamplingParams(temperature=0.0, grammar=grammar)
    for _ in range(8):
        state = compiler.compile(grammar).start()
        one = Constraints(params, vocab_size, state.copy())
        ahead: list[int] = []
        for _ in range(20):
            logits = torch.from_numpy(rng.normal(size=vocab_size).astype(np.float32))
            allowed = state.allowed()
            if allowed is None or not allowed.any() or state.is_over:
                break
            favoured = int(rng.choice(np.flatnonzero(allowed)))
            logits[favoured] += float(rng.choice([0.0, 9.0]))
            expected = int(np.where(allowed, logits.numpy(), -np.inf).argmax())
            assert one.most_likely(logits.numpy(), ahead, int(logits.argmax())) == expected
            state.append(expected)
            ahead.append(expected)


@pytest.mark.parametrize("text", [json.dumps(SCHEMA), '{"type": "object"}'])
def test_what_was_found_likeliest_need_not_be_appended(tokenizer, text):
    """A token that `most_likely` returned is taken back where another follows, or something else is asked."""
    rng = np.random.default_rng(2)
    vocab_size = len(tokenizer.transformers_tokenizer)
    compiler = GrammarCompiler(tokenizer.transformers_tokenizer, vocab_size, [0])
    spec = GrammarSpec("json_schema", text)
    for _ in range(12):
        state, plain = compiler.compile(spec).start(), compiler.compile(spec).start()
        for _ in range(30):
            allowed = plain.allowed()
            if allowed is None or plain.is_over or not allowed.any():
                break
            logits = rng.normal(size=vocab_size).astype(np.float32)
            favoured = int(rng.choice(np.flatnonzero(allowed)))
            logits[favoured] += float(rng.choice([0.0, 9.0]))
            found = state.most_likely(logits, [], int(logits.argmax()))
            assert found == int(np.where(allowed, logits, -np.inf).argmax())
            match int(rng.integers(5)):
                case 0:
                    again = state.allowed()
                    assert again is not None
                    assert np.array_equal(again, allowed)
                case 1:
                    assert state.num_valid([found]) == 1
                case 2:
                    state = state.copy()
                case 3:
                    assert state.forced() == plain.forced()
            next_token = found if rng.random() < 0.7 else int(rng.choice(np.flatnonzero(allowed)))
            state.append(next_token)
            plain.append(next_token)
        assert state.is_over == plain.is_over


@pytest.mark.parametrize("seed", range(4))
def test_forced_text_is_the_same_with_drafts_and_without(tokenizer, seed):
    """However far drafts reach, and wherever they break off."""
    rng = np.random.default_rng(seed)
    vocab_size = len(tokenizer.transformers_tokenizer)
    compiler = GrammarCompiler(tokenizer.transformers_tokenizer, vocab_size, [0])
    spec = GrammarSpec("regex", "([a-c]: the same words each time, [a-c]; or[0-9]the others here[0-9]){1,4}")
    logits = rng.normal(size=(400, vocab_size)).astype(np.float32)
    likeliest = logits.argmax(1)

    def drawn(state, position, ahead):
        return state.most_likely(logits[position], ahead, int(likeliest[position]))

    plain = compiler.compile(spec).start()
    expected: list[int] = []
    while not plain.is_over and len(expected) < 300:
        expected.append(drawn(plain, len(expected), []))
        plain.append(expected[-1])
    assert plain.is_over
    drafting = compiler.compile(spec).start()
    found: list[int] = []
    while len(found) < len(expected):
        draft = expected[len(found) :][: int(rng.integers(0, 30))]
        if draft and rng.random() < 0.5:
            draft[int(rng.integers(len(draft)))] = int(rng.integers(vocab_size))
        forced = drafting.forced() if rng.random() < 0.5 else []
        if forced and rng.random() < 0.5:
            draft = forced[: int(rng.integers(1, len(forced) + 1))]
        rows = [drawn(drafting, len(found) + i, draft[:i]) for i in range(len(draft) + 1)]
        for i, token in enumerate(rows):
            found.append(token)
            drafting.append(token)
            if len(found) == len(expected) or (i < len(draft) and draft[i] != token):
                break
        if rng.random() < 0.1:
            drafting = drafting.copy()
    assert found == expected


def test_a_packed_mask_is_the_grammars_own():
    allowed = np.random.default_rng(0).random((3, 77)) < 0.3
    packed = np.packbits(allowed, axis=1, bitorder="little")
    logits = torch.arange(3 * 77, dtype=torch.float32).reshape(3, 77)
    found = keep_allowed(logits, list(packed)).numpy()
    np.testing.assert_array_equal(found, np.where(allowed, logits.numpy(), -np.inf))
    assert logits[2, 76] == 3 * 77 - 1
