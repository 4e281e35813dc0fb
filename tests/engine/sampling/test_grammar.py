"""Grammars: what they allow, step by step, and what clients are told of those that can't be compiled."""

import json
import re

import numpy as np
import pytest
from tests.engine.tokenizers_for_tests import END, byte_level, sentencepiece_like

from stemma.engine.sampling.grammar import Cutter, GrammarSpec
from stemma.engine.sampling.grammar_compiler import GrammarCompiler
from stemma.errors import InvalidRequest
from stemma.model.files.tiny import TURN_END, build_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, len(tokenizer) + 9, [tokenizer.convert_tokens_to_ids(TURN_END)])


def write(compiler: GrammarCompiler, tokenizer, spec: GrammarSpec, seed: int, limit: int = 300) -> str | None:
    """Return a random text that the grammar allows to its end, or None if it went on past the limit."""
    generator = np.random.default_rng(seed)
    state = compiler.compile(spec).start()
    ids: list[int] = []
    for _ in range(limit):
        allowed = state.allowed()
        assert allowed is not None
        choices = np.flatnonzero(allowed)
        assert len(choices) > 0
        assert choices.max() < len(tokenizer)
        token_id = int(generator.choice(choices))
        if token_id == tokenizer.convert_tokens_to_ids(TURN_END):
            return str(tokenizer.decode(ids))
        ids.append(token_id)
        state.append(token_id)
    return None


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_is_one_of_the_choices(compiler, tokenizer, seed):
    choices = ["yes", "no", "a (maybe)"]
    assert write(compiler, tokenizer, GrammarSpec("choice", json.dumps(choices)), seed) in choices


@pytest.mark.parametrize("seed", range(3))
def test_a_regex_is_followed(compiler, tokenizer, seed):
    text = write(compiler, tokenizer, GrammarSpec("regex", r"[0-9]{3}-[a-c]+x"), seed)
    assert text is None or re.fullmatch(r"[0-9]{3}-[a-c]+x", text)


def test_a_schema_accepts_its_objects_alone(compiler, tokenizer):
    state = compiler.compile(GrammarSpec("json_schema", json.dumps(SCHEMA))).start()
    good = tokenizer.encode('{"name": "Ada", "age": 36}')
    assert state.num_valid(good) == len(good)
    bad = tokenizer.encode('{"name": 3')
    assert state.num_valid(bad) < len(bad)


def test_masks_ahead_of_a_draft_are_those_after_its_tokens(compiler, tokenizer):
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
    draft = tokenizer.encode('{"name": "Ada"')
    ahead, stepped = compiler.compile(spec).start(), compiler.compile(spec).start()
    for position in range(len(draft) + 1):
        allowed = stepped.allowed()
        assert allowed is not None
        np.testing.assert_array_equal(ahead.allowed(draft[:position]), allowed)
        if position < len(draft):
            stepped.append(draft[position])


def test_nothing_follows_a_draft_that_breaks_the_grammar(compiler, tokenizer):
    state = compiler.compile(GrammarSpec("choice", '["yes"]')).start()
    assert state.allowed(tokenizer.encode("no")) is None
    allowed = state.allowed()
    assert allowed is not None
    assert allowed.any()


def test_nothing_follows_a_draft_that_ends_the_grammar(compiler, tokenizer):
    state = compiler.compile(GrammarSpec("choice", '["yes"]')).start()
    draft = [*tokenizer.encode("yes"), tokenizer.convert_tokens_to_ids(TURN_END)]
    assert state.allowed(draft) is None
    ends = state.allowed(draft[:-1])
    assert ends is not None
    assert np.flatnonzero(ends).tolist() == [tokenizer.convert_tokens_to_ids(TURN_END)]
    assert state.num_valid(draft) >= len(draft) - 1


def test_a_copy_goes_its_own_way(compiler, tokenizer):
    state = compiler.compile(GrammarSpec("choice", '["yes", "no"]')).start()
    other = state.copy()
    for token_id in tokenizer.encode("yes"):
        state.append(token_id)
    assert state.is_over
    assert other.num_valid(tokenizer.encode("no")) == len(tokenizer.encode("no"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a(b"),
        ("json_schema", "{"),
        ("json_schema", '{"type": "nothing"}'),
        ("choice", "[]"),
        ("choice", '["", "a"]'),
        ("choice", "yes"),
        ("grammar", "start: missing"),
        ("grammar", "root ::= missing"),
        ("json_schema", "x" * 70_000),
    ],
)
def test_what_is_no_grammar_is_refused_by_the_fields_name(compiler, kind, text):
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(GrammarSpec(kind, text, param="guided"))
    assert caught.value.param == "guided"


def test_grammars_are_remembered(compiler):
    spec = GrammarSpec("regex", "[ab]{4}")
    assert compiler.compile(spec) is compiler.compile(spec)


def test_a_grammar_in_gbnf_is_followed(compiler, tokenizer):
    assert write(compiler, tokenizer, GrammarSpec("grammar", 'root ::= "ab" | "cd"'), 1) in ("ab", "cd")


@pytest.mark.parametrize(
    ("before", "text", "ok"),
    [
        ("", "12", True),
        ("", "<think>hm</think>12", False),
        ("start: THINK? @answer\nTHINK: /<t>[a-z]+/\n", "12", True),
        ("start: THINK? @answer\nTHINK: /<t>[a-z]+/\n", "<t>hm12", True),
        ("start: THINK @answer\nTHINK: /<t>[a-z]+/\n", "12", False),
    ],
)
@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_another_grammar_comes_before_the_grammar(compiler, tokenizer, kind, before, text, ok):
    answer = {"regex": "[0-9]{2}", "grammar": "start: /[0-9]{2}/"}[kind]
    state = compiler.compile(GrammarSpec(kind, answer, before)).start()
    ids = tokenizer.encode(text)
    is_valid = state.num_valid(ids) == len(ids)
    for token_id in ids:
        state.append(token_id)
    assert (is_valid and state.is_over) is ok


TEXTS = ['name"', '"', " the quick brown fox", "Grüße 你好 🙂", '{"a": [1, 2, 3]}', "x" * 500, " ä" * 200]


@pytest.mark.parametrize("text", TEXTS)
def test_forced_text_is_cut_as_any_longer_text_begins(tokenizer, text):
    """And in the same way when it is asked again, by the tokenizer's own cut of the whole."""
    from llguidance.hf import from_tokenizer

    cutter = Cutter(from_tokenizer(tokenizer))
    data = text.encode()
    tokens = cutter.cut(data)
    assert cutter.cut(data) == tokens
    assert data.startswith(cutter.tokenizer.decode_bytes(tokens))
    for behind in ("", "a", '"', ": ", " the", "ü", "12", text):
        assert tokenizer.encode(text + behind, add_special_tokens=False)[: len(tokens)] == tokens


@pytest.mark.parametrize("data", [b"\xff[3]", b"abc\xff", b"\xc3", b""])
def test_text_that_spells_no_characters_is_not_forced_beyond_them(tokenizer, data):
    from llguidance.hf import from_tokenizer

    cutter = Cutter(from_tokenizer(tokenizer))
    assert data.startswith(cutter.tokenizer.decode_bytes(cutter.cut(data)))
    if b"\xff" in data:
        assert cutter.cut(data) == []


def test_a_long_constant_is_written_as_it_stands(compiler, tokenizer):
    """Forced from its first token to its last but one, in drafts of bounded length."""
    text = "".join(f"{number} of the quick brown foxes, " for number in range(90))
    state = compiler.compile(GrammarSpec("regex", re.escape(text))).start()
    ids: list[int] = []
    while not state.is_over and len(tokenizer.decode(ids)) < len(text):
        forced = state.forced()
        assert len(forced) <= 64
        allowed = state.allowed()
        assert allowed is not None
        for token in forced or [int(np.flatnonzero(allowed)[-1])]:
            ids.append(token)
            state.append(token)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_forced_tokens_are_what_the_grammar_allows(make, tmp_path):
    """Also where a tokenizer writes a mark for the space before a text."""
    hf_tokenizer = make(tmp_path).transformers_tokenizer
    compiler = GrammarCompiler(hf_tokenizer, len(hf_tokenizer), [hf_tokenizer.convert_tokens_to_ids(END)])
    for text in ("the quick fox, abc the fox.", " the fox", "ä the", "a  b"):
        state = compiler.compile(GrammarSpec("regex", re.escape(text))).start()
        forced = state.forced()
        assert state.num_valid(forced) == len(forced)
