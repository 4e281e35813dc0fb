"""A budget of thinking in each family's own marks, whether the tokenizer has tokens for these or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from tests.server.answers.reading import read, reader
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.grammar_compiler import GrammarCompiler
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.thinking import ThinkingLimit
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.answers.formats.thinking import THINKING_FORMATS, ThinkingFormat

Mode = Literal["off", "auto", "required", "named"]
KINDS = ("bytes", "special", "pieces", "sentencepiece")
PIECES = ("</", "thi", "nk", ">\n\n", " my", "resp", "onse", "Here", "channel", "end")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL_OF = {"harmony": "harmony", "mistral": "mistral_args", "gemma4": "gemma4", "seed": "seed_oss"}
"""Formats of calls beside those of thinking; others: Hermes."""


def _raw(kind: str) -> RawTokenizer:
    if kind == "sentencepiece":
        chars = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
        vocab = {text: number for number, text in enumerate(chars)}
        raw = RawTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        raw.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return raw
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return raw


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Characters alone; or with tokens for all marks; or for parts of them."""
    hf = PreTrainedTokenizerFast(tokenizer_object=_raw(request.param), eos_token="</s>")
    if request.param == "special":
        marks = {marker for form in THINKING_FORMATS.values() for marker in form.markers}
        hf.add_special_tokens({"additional_special_tokens": sorted(mark.strip() for mark in marks)})
    if request.param == "pieces":
        hf.add_tokens(list(PIECES))
    path = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(path)
    return Tokenizer(path)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def limits_of(
    tokenizer: Tokenizer, form: ThinkingFormat, budget: int, *, tools: Mode = "off"
) -> SamplingParams:
    """Return the sampling of a request behind a prompt that ends inside the thinking."""
    made = reader(
        TOOL_OF.get(form.name, "hermes"), form.name, opened=True, mode=tools, schemas={"add": SCHEMA}
    )
    return made.constrain(SamplingParams(max_thinking_tokens=budget), tokenizer)


def written(params: SamplingParams, wanted: list[int]) -> list[int]:
    """Return the output of a model that wants `wanted` where nothing is forced."""
    assert params.thinking is not None
    assert params.max_thinking_tokens is not None
    limit = ThinkingLimit(params.thinking, params.max_thinking_tokens)
    output, rest = [], list(wanted)
    while rest or limit.forced() is not None:
        forced = limit.forced()
        output.append(rest.pop(0) if forced is None else forced)
        limit.append(output[-1])
    return output


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def whole_chars(tokenizer: Tokenizer, ids: list[int], number: int) -> list[int]:
    """Return the first `number` of `ids`, and those that the last character still needs."""
    while text_of(tokenizer, ids[:number]).endswith("\ufffd"):
        number += 1
    return ids[:number]


@pytest.mark.parametrize("name", THINKING_FORMATS)
def test_thinking_ends_at_the_budget(tokenizer: Tokenizer, name: str):
    form = THINKING_FORMATS[name]
    thought = ids_of(tokenizer, "I thought and thought")
    params = limits_of(tokenizer, form, len(thought) - 4)
    output = written(params, thought + ids_of(tokenizer, "so"))
    expected = text_of(tokenizer, thought[:-4]).strip()
    answer = read(text_of(tokenizer, output), None, name, opened=True, mode="off")
    assert answer.reasoning.strip() == expected
    assert answer.content.replace(" ", "") == "ught" + "so"


@pytest.mark.parametrize("name", THINKING_FORMATS)
def test_thinking_that_begins_in_the_answer_is_counted_from_there(tokenizer: Tokenizer, name: str):
    form = THINKING_FORMATS[name]
    params = limits_of(tokenizer, form, 3)
    assert params.thinking is not None
    closed = replace(params.thinking, marks=form.marks(is_open=False))
    params = replace(params, thinking=closed)
    output = written(params, ids_of(tokenizer, f"{form.opener}abcdef"))
    answer = read(text_of(tokenizer, output), None, name, mode="off")
    assert (answer.reasoning.strip(), answer.content) == ("abc", "def")


@pytest.mark.parametrize("name", THINKING_FORMATS)
def test_an_end_that_the_model_writes_itself_in_any_tokens_is_seen(tokenizer: Tokenizer, name: str):
    form = THINKING_FORMATS[name]
    ids = ids_of(tokenizer, f"hm{form.closer}{form.behind}{'So it is. ' * 9}")
    assert written(limits_of(tokenizer, form, len(ids_of(tokenizer, "hm" + form.closer))), ids) == ids


@pytest.mark.parametrize("name", THINKING_FORMATS)
def test_an_end_that_the_model_has_begun_is_finished(tokenizer: Tokenizer, name: str):
    """Nothing of it is left in the thinking or the answer, wherever the budget falls."""
    form = THINKING_FORMATS[name]
    begun = ids_of(tokenizer, f"hm{form.closer}")
    num_thought = len(ids_of(tokenizer, "hm"))
    for budget in range(num_thought, len(begun)):
        output = written(limits_of(tokenizer, form, budget), whole_chars(tokenizer, begun, budget))
        answer = read(text_of(tokenizer, output), None, name, opened=True, mode="off")
        assert (answer.reasoning.strip(), answer.content) == ("hm", ""), budget


@pytest.mark.parametrize("name", ["think", "granite"])
def test_a_character_isnt_cut_by_the_end(tokenizer: Tokenizer, name: str):
    form = THINKING_FORMATS[name]
    ids = ids_of(tokenizer, "h\N{SNOWMAN}\N{SNOWMAN}")
    for budget in range(1, len(ids) + 1):
        wanted = whole_chars(tokenizer, ids, budget)
        text = text_of(tokenizer, written(limits_of(tokenizer, form, budget), wanted))
        assert "\ufffd" not in text
        assert form.closer in text


@pytest.mark.parametrize("tools", ["off", "required"])
@pytest.mark.parametrize("name", THINKING_FORMATS)
def test_a_grammar_behind_the_thinking_allows_the_forced_end(tokenizer: Tokenizer, name: str, tools: Mode):
    form = THINKING_FORMATS[name]
    compiler = GrammarCompiler(
        tokenizer.transformers_tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids
    )
    begun = ids_of(tokenizer, f"hm{form.closer}")
    for budget in range(1, len(begun)):
        made = reader(TOOL_OF.get(name, "hermes"), name, opened=True, mode=tools, schemas={"add": SCHEMA})
        params = SamplingParams(
            grammar=None if tools == "required" else GrammarSpec("regex", "yes"), max_thinking_tokens=budget
        )
        params = made.constrain(params, tokenizer)
        assert params.grammar is not None
        output = written(params, whole_chars(tokenizer, begun, budget))
        state = compiler.compile(params.grammar).start()
        assert state.num_valid(output) == len(output)
        for token in output:
            state.append(token)
        assert not state.is_over


def test_behind_a_forced_end_harmony_may_call_a_tool_but_not_think_again(tokenizer: Tokenizer):
    form = THINKING_FORMATS["harmony"]
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    again = "<|channel|>analysis<|message|>more"
    for wanted, calls, content in ((call, 1, ""), (again, 0, "more")):
        ids = ids_of(tokenizer, "abc")
        params = limits_of(tokenizer, form, len(ids), tools="auto")
        output = written(params, ids + ids_of(tokenizer, wanted))
        answer = read(text_of(tokenizer, output), "harmony", "harmony", opened=True)
        assert (answer.reasoning.strip(), len(answer.calls), answer.content) == ("abc", calls, content)
