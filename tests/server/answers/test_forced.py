"""Calls that a request demands are written as the family was taught, and read by the same reader."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.server.answers.reading import pieces_read, read, reader
from tests.server.answers.written_calls import EXPECTED, ONE_CALL, WRITERS, written
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stemma.engine.sampling.grammar_compiler import GrammarCompiler
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import InvalidRequest
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.answers.chat import tool_use
from stemma.server.answers.events import Answer, ToolCall, fold
from stemma.server.answers.formats.forced import JSON_LIST, TextGrammar, forced_grammar
from stemma.server.answers.formats.registry import TOOL_FORMATS
from stemma.server.answers.formats.thinking import THINKING_FORMATS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "sure": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
PARIS = {"city": 'A "long"\n name', "days": 3}
SIMPLE = {"city": "Paris", "days": 3, "unit": "F"}
TOKENIZER = LLTokenizer("byte")
ROOTS: list[dict[str, Any]] = [
    {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#"}},
        "required": ["a"],
        "$defs": {"A": {"type": "integer"}},
    },
]


def accepts(grammar: str, text: str, *, before: str = "") -> bool:
    """Return whether `text` is a whole answer."""
    source = LLMatcher.grammar_from_lark(grammar)
    if before:
        named = (("whole", before), ("answer", grammar))
        source = json.dumps({"grammars": [{"name": name, "lark_grammar": text} for name, text in named]})
    matcher = LLMatcher(TOKENIZER, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def grammar_of(name: str, *, single: bool = False, schema: dict[str, Any] = SCHEMA) -> str:
    return forced_grammar(TOOL_FORMATS[name].form, {"get_weather": schema, "add": {}}, {}, single=single)


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_template_writes_is_what_is_demanded(name: str):
    tools = EXPECTED[name][0] or ""
    calls = [("get_weather", PARIS), ("get_weather", {**PARIS, "unit": "F"})]
    several = written(name, calls[:1] if name in (*ONE_CALL, "harmony") else calls)
    several = several.replace("[TOOL_CALLS] [", "[TOOL_CALLS][").replace(
        ', "id": "functions.get_weather:0"', ""
    )
    several = several.replace(', "id": "functions.get_weather:1"', "").replace(
        " to=functions", " to=functions"
    )
    if name == "harmony":
        several = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + json.dumps(
            PARIS
        )
    assert accepts(grammar_of(tools), several)
    if name not in (*ONE_CALL, "harmony"):
        assert not accepts(grammar_of(tools, single=True), several)


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_without_what_its_schema_demands_isnt_written(name: str):
    tools = EXPECTED[name][0] or ""
    for wrong in ({"city": "Paris"}, {"city": "Paris", "days": 3, "unit": "K"}):
        assert not accepts(grammar_of(tools), written(name, [("get_weather", wrong)]))
    assert not accepts(grammar_of(tools), written(name, [("unheard", SIMPLE)]))


@pytest.mark.parametrize("schema", ROOTS, ids=str)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_any_schema_can_be_demanded(name: str, schema: dict[str, Any]):
    """References mean the tool's own schema; what a form can't hold is a JSON list."""
    grammar = grammar_of(name, single=True, schema=schema)
    value = {"a": "xx"} if "string" in json.dumps(schema) else {"a": 1}
    listed = json.dumps([{"name": "get_weather", "arguments": value}])
    wrong = json.dumps([{"name": "get_weather", "arguments": {"a": "no"}}])
    if "start:  r0" in grammar or not accepts(grammar, listed):
        assert not accepts(grammar, wrong)
        return
    assert not accepts(grammar, wrong)
    assert read(listed, name, mode="required") == Answer(calls=[ToolCall("get_weather", json.dumps(value))])


def test_a_reference_to_the_root_means_the_tools_own_schema():
    nested = {"a": 1, "b": {"a": 2}}
    text = json.dumps([{"name": "get_weather", "arguments": nested}])
    assert accepts(forced_grammar(JSON_LIST, {"get_weather": ROOTS[2]}, {}, single=True), text)
    wrong = json.dumps([{"name": "get_weather", "arguments": {"a": 1, "b": {"b": {}}}}])
    assert not accepts(forced_grammar(JSON_LIST, {"get_weather": ROOTS[2]}, {}, single=True), wrong)


@pytest.mark.parametrize("name", ["think", "seed", "gemma4", "harmony"])
def test_thinking_may_come_before_a_demanded_call(name: str):
    form = THINKING_FORMATS[name]
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for is_open in (False, True):
        before = form.before_grammar({}, is_open=is_open, is_call=True)
        thought = f"{'' if is_open else form.opener}I {{think}}.{form.closer}"
        thought += "<|start|>assistant" if name == "harmony" else ""
        assert accepts(grammar_of("hermes"), thought + call, before=before)
        assert accepts(grammar_of("hermes"), call, before=before) == (not is_open)
    text = form.before_grammar({}, is_open=False, is_call=False)
    answer = "<|channel|>final<|message|>" + call if name == "harmony" else call
    assert accepts(grammar_of("hermes"), answer, before=text)


def test_markers_that_are_special_tokens_are_demanded_as_tokens():
    grammar = forced_grammar(TOOL_FORMATS["mistral_args"].form, {"add": {}}, {"[TOOL_CALLS]": 9}, single=True)
    assert '<[9]> "add[ARGS]"' in grammar


def test_a_demanded_call_is_read_by_the_same_reader():
    text = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
    expected = Answer(calls=[ToolCall("get_weather", '{"city": "Paris"}')])
    assert read(text, "glm", mode="required") == expected
    assert read("hm</think>\n\n" + text, "glm", "think", mode="required", opened=True) == Answer(
        "", "hm", expected.calls
    )
    assert read('[{"name": "add", "arguments": {}}]', None, mode="required").calls == [ToolCall("add", "{}")]
    assert read("no call", None, mode="required") == Answer("no call")


SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")


@pytest.fixture(scope="module")
def special_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and markers that are special tokens, as Mistral's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return tokenizer


@pytest.mark.parametrize(
    ("text", "opened", "ok"),
    [
        ('[TOOL_CALLS]add[ARGS]{"a": 1}', False, True),
        ('[THINK]I [see].[/THINK][TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}', False, True),
        ('hm[/THINK][TOOL_CALLS]add[ARGS]{"a": 1}', True, True),
        ('[TOOL_CALLS]add[ARGS]{"a": "x"}', False, False),
        ("text", False, False),
    ],
)
def test_special_tokens_are_part_of_what_an_engine_may_draw(
    special_tokenizer: PreTrainedTokenizerFast, text: str, opened: bool, ok: bool
):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    made = reader("mistral_args", "mistral", mode="required", schemas={"add": schema}, opened=opened)
    known = Mock(spec=Tokenizer, special_token_texts=frozenset(SPECIAL))
    known.encode = lambda marker, **_: special_tokenizer.encode(marker, add_special_tokens=False)
    params = made.constrain(SamplingParams(), known)
    assert not params.skip_special_tokens
    assert params.grammar is not None
    compiler = GrammarCompiler(special_tokenizer, len(special_tokenizer), [special_tokenizer.eos_token_id])
    state = compiler.compile(params.grammar).start()
    ids = special_tokenizer.encode(text, add_special_tokens=False)
    assert (state.num_valid([*ids, special_tokenizer.eos_token_id]) == len(ids) + 1) is ok
    if ok:
        assert fold(pieces_read(made, text)).calls[0] == ToolCall("add", '{"a": 1}')


PATCH = 'start: "*** Begin" LF line+ "*** End"\nline: ("+" | "-") /(.*)/ LF\n%import common.LF\n'
ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
OWN_WORDS = {"harmony", "mistral_list"}
"""Whose templates write calls otherwise than is demanded here: in another order, with other white space."""


@pytest.mark.parametrize("name", sorted(set(WRITERS) - OWN_WORDS))
def test_a_text_follows_its_grammar_where_any_call_is_demanded(name: str):
    form = TOOL_FORMATS[EXPECTED[name][0] or ""].form
    tools = {"apply": ONE_TEXT, "other": ONE_TEXT}
    texts = {"apply": TextGrammar("lark", PATCH)}
    grammar = forced_grammar(form, tools, {}, single=False, texts=texts)
    right, wrong = '*** Begin\n+print("a\\n")\n*** End', "*** Begin\nanything\n*** End"
    assert accepts(grammar, written(name, [("apply", {"input": right})]))
    assert not accepts(grammar, written(name, [("apply", {"input": wrong})]))
    assert accepts(grammar, written(name, [("other", {"input": wrong})]))


def test_a_text_that_calls_cannot_hold_is_refused():
    tools = [{"type": "function", "function": {"name": "apply", "parameters": ONE_TEXT}}]
    use = tool_use(tools, "required", parallel=True, texts={"apply": TextGrammar("regex", "(?x: a b)")})
    made = reader("hermes", schemas={"apply": ONE_TEXT})
    with pytest.raises(InvalidRequest, match="the form of a tool's text can't stand in this model's calls"):
        type(made)(made.format, use, made.opened).constrain(
            SamplingParams(), Mock(special_token_texts=frozenset())
        )
