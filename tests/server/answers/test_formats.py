"""Answers as each family writes them, and as models write them wrongly, each whole and cut to pieces."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.answers.reading import TOOLS, cut, joined, pieces_read, read, reader

from stemma.server.answers.events import Answer, ToolCall, fold
from stemma.server.answers.formats.registry import TOOL_FORMATS

WEATHER = '{"city": "Paris \\"}{ [x]", "units": {"t": "C"}}'
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI = "<|tool_calls_section_begin|>" + KIMI_CALL
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DEEPSEEK_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def call(name: str, arguments: str, call_id: str = "") -> ToolCall:
    return ToolCall(name, arguments, call_id)


PARIS = call("get_weather", '{"city": "Paris"}')
ADD = call("add", "{}")

CASES: list[tuple[str, str, Answer]] = [
    (
        "hermes",
        f'Let me look.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        Answer("Let me look.", calls=[call("get_weather", WEATHER)]),
    ),
    (
        "hermes",
        f'<tool_call>{{"arguments": {WEATHER}, "name": "get_weather"}}</tool_call>\n<tool_call>\n'
        '{"name": "add", "arguments": {}}\n</tool_call>',
        Answer(calls=[call("get_weather", WEATHER), ADD]),
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', Answer(calls=[ADD])),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Answer(calls=[call("add", '{"a": 1}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        Answer(calls=[call("get_weather", '{"city": "Par')]),
    ),
    (
        "hermes",
        "<tool_call>no json</tool_call> and <tool_ca",
        Answer("<tool_call>no json</tool_call> and <tool_ca"),
    ),
    ("hermes", "plain < text with <tool and spaces  ", Answer("plain < text with <tool and spaces  ")),
    # A missing brace swallows nothing.
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>\nDone: {"b": 2}}',
        Answer('Done: {"b": 2}}', calls=[call("add", '{"a": 1}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": [1, 2</tool_call>rest',
        Answer("rest", calls=[call("add", '{"a": [1, 2]}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>',
        Answer(calls=[call("add", '{"a": 1}')]),
    ),
    # A call without its closing tag loses neither the next call nor text.
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {}}\n<tool_call>{"name": "get_weather", "arguments": '
        '{"city": "Paris"}}</tool_call>',
        Answer(calls=[ADD, PARIS]),
    ),
    ("hermes", '<tool_call>{"name": "add"} and so on', Answer("and so on", calls=[ADD])),
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {}}\n{"name": "add", "arguments": {}}\n</tool_call>',
        Answer(calls=[ADD, ADD]),
    ),
    ("hermes", '<tool_call>[{"name": "add", "arguments": {}}]</tool_call>', Answer(calls=[ADD])),
    # Line breaks in strings leave as JSON writes them.
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "1\n2\t"}}</tool_call>',
        Answer(calls=[call("add", '{"a": "1\\n2\\t"}')]),
    ),
    # Spaces beside a call are the model's; line breaks are the format's.
    ("hermes", 'Well:  <tool_call>{"name": "add"}</tool_call>', Answer("Well:  ", calls=[ADD])),
    ("hermes", ' \n <tool_call>{"name": "add"}</tool_call>\n', Answer("", calls=[ADD])),
    (
        "hermes",
        'One.\n<tool_call>{"name": "add"}</tool_call>\nTwo.\n',
        Answer("One.\nTwo.\n", calls=[ADD]),
    ),
    (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {WEATHER}}}',
        Answer(calls=[call("get_weather", WEATHER)]),
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "add", "parameters": {"a": 1}}',
        Answer(calls=[PARIS, call("add", '{"a": 1}')]),
    ),
    ("llama3_json", '{"name": "Ada", "born": 1815}', Answer('{"name": "Ada", "born": 1815}')),
    ("llama3_json", '{"answer": 42}', Answer('{"answer": 42}')),
    ("llama3_json", "It is 7 < 8.", Answer("It is 7 < 8.")),
    ("llama3_json", "<|python", Answer("<|python")),
    (
        "llama3_json",
        '{"name": "add", "parameters": {}} {"name": "Ada"}',
        Answer('{"name": "Ada"}', calls=[ADD]),
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "add", '
        f'"arguments": {{}}}}]',
        Answer(calls=[call("get_weather", WEATHER), ADD]),
    ),
    (
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{{}}",
        Answer(calls=[call("get_weather", WEATHER), call("add", "{}", "abcdefghi")]),
    ),
    (
        "mistral",
        f"Well. [TOOL_CALLS]get_weather{WEATHER}",
        Answer("Well. ", calls=[call("get_weather", WEATHER)]),
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {}}] And text.',
        Answer("And text.", calls=[ADD]),
    ),
    ("mistral", "[TOOL_CALLS]add[ARGS]{} And text.", Answer("And text.", calls=[ADD])),
    ("mistral", "[TOOL_CALLS] nothing", Answer("[TOOL_CALLS] nothing")),
    ("mistral", "[TOOL_", Answer("[TOOL_")),
    (
        "deepseek_v3",
        f"Right.\n{DEEPSEEK}function<｜tool▁sep｜>get_weather\n```json\n{WEATHER}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{{}}\n```{DEEPSEEK_END}",
        Answer("Right.", calls=[call("get_weather", WEATHER), ADD]),
    ),
    (
        "deepseek_v31",
        f"{DEEPSEEK}get_weather<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add"
        f"<｜tool▁sep｜>{{}}{DEEPSEEK_END}I wait.",
        Answer("I wait.", calls=[call("get_weather", WEATHER), ADD]),
    ),
    ("deepseek_v31", "no calls here", Answer("no calls here")),
    (
        "deepseek_v31",
        f"{DEEPSEEK}add and nothing",
        Answer("<｜tool▁call▁begin｜>add and nothing"),
    ),
    (
        "kimi_k2",
        KIMI.format("get_weather:0", '{"city": "Paris"}')
        + "<|tool_call_begin|> functions.add:1 <|tool_call_argument_begin|> {} <|tool_call_end|>"
        "<|tool_calls_section_end|>Bye.",
        Answer(
            "Bye.",
            calls=[
                call("get_weather", '{"city": "Paris"}', "functions.get_weather:0"),
                call("add", "{}", "functions.add:1"),
            ],
        ),
    ),
    (
        "kimi_k2",
        KIMI.format("add:0", '{"a": [1}')
        + "<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{}",
        Answer(calls=[call("add", '{"a": [1]}', "functions.add:0"), call("add", "{}", "functions.add:1")]),
    ),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n\n Paris\n\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        Answer("I look.", calls=[call("get_weather", '{"city": "\\n Paris\\n", "days": 3}')]),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n</function>\n</tool_call>",
        Answer(calls=[ADD, ADD]),
    ),
    # The outer tag, or a closing one, is left out.
    (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        Answer(calls=[PARIS]),
    ),
    ("qwen3_coder", "<function=unheard>text", Answer("<function=unheard>text")),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        Answer(calls=[call("get_weather", '{"city": "Paris", "days": 3}')]),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>\nBye.",
        Answer("Bye.", calls=[PARIS]),
    ),
    ("qwen3_coder", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', Answer(calls=[ADD])),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        Answer(calls=[call("get_weather", '{"city": "Par')]),
    ),
    (
        "glm",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>add</tool_call>",
        Answer("I look.", calls=[call("get_weather", '{"city": "Paris", "days": 3}'), ADD]),
    ),
    (
        "glm",
        "<tool_call>add\n<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        Answer(calls=[ADD, PARIS]),
    ),
    ("glm", "a <tool_call> is text", Answer("a <tool_call> is text")),
    (
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter '
        'name="city">Paris</parameter>\n'
        '</invoke>\n<invoke name="add">\n</invoke>\n</minimax:tool_call>',
        Answer("I look.", calls=[PARIS, ADD]),
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="true">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        Answer(calls=[call("add", '{"a": "1", "b": 1}')]),
    ),
    (
        "gemma4",
        'I look.<|tool_call>call:get_weather{city:<|"|>Pa"r,}is<|"|>,map:{a:true,b:[<|"|>x<|"|>,1.5,null]}}'
        "<tool_call|><|tool_call>call:add{}<tool_call|>",
        Answer(
            "I look.",
            calls=[
                call("get_weather", '{"city": "Pa\\"r,}is", "map": {"a": true, "b": ["x", 1.5, null]}}'),
                ADD,
            ],
        ),
    ),
    (
        "pythonic",
        "[get_weather(city=\"Paris\", list=[1, 'a', True, None], map={'a': (1, 2),}), add()]",
        Answer(
            calls=[
                call("get_weather", '{"city": "Paris", "list": [1, "a", true, null], "map": {"a": [1, 2]}}'),
                ADD,
            ]
        ),
    ),
    (
        "pythonic",
        r'[get_weather(city="""a "b" c\n""")]',
        Answer(calls=[call("get_weather", r'{"city": "a \"b\" c\n"}')]),
    ),
    (
        "pythonic",
        r"[get_weather(city='it\'s \u00e9 \\d \d')]",
        Answer(calls=[call("get_weather", r'{"city": "it' + "'" + r's é \\d \\d"}')]),
    ),
    ("pythonic", "<|python_start|>[add()]<|python_end|>", Answer(calls=[ADD])),
    ("pythonic", '{"name": "get_weather", "parameters": {"city": "Paris"}}', Answer(calls=[PARIS])),
    ("pythonic", "[1, 2] are numbers", Answer("[1, 2] are numbers")),
    ("pythonic", "[unheard(a=1)]", Answer("[unheard(a=1)]")),
    ("pythonic", "[get_weather(city='Par", Answer(calls=[call("get_weather", '{"city": "Par')])),
    (
        "olmo3",
        'I look.\n<function_calls>\nget_weather(city="Paris")\nadd()\n</function_calls>',
        Answer("I look.", calls=[PARIS, ADD]),
    ),
    (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Paris"), add()]<|tool_call_end|>I look.',
        Answer("I look.", calls=[PARIS, ADD]),
    ),
    ("granite", '<|tool_call|>[{"name": "add", "arguments": {}}]', Answer(calls=[ADD])),
    ("phi4", 'functools[{"name": "add", "arguments": {}}]', Answer(calls=[ADD])),
    ("phi4", "functools are Python's", Answer("functools are Python's")),
    ("nemotron", '<TOOLCALL>[{"name": "add", "arguments": {}}]</TOOLCALL>', Answer(calls=[ADD])),
    (
        "jamba",
        '<tool_calls>[\n{"name": "add", "arguments": {}},\n{"name": "add", "arguments": {}}\n]</tool_calls>',
        Answer(calls=[ADD, ADD]),
    ),
    (
        "internlm",
        'I look.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": '
        '"Paris"}}<|action_end|>\n',
        Answer("I look.", calls=[PARIS]),
    ),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {}}\n]<|END_ACTION|>',
        Answer(calls=[ADD]),
    ),
    ("cohere", "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", Answer("Hello.")),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=list>['a', True]</parameter>\n</function>\n</seed:tool_call>",
        Answer(calls=[call("get_weather", '{"city": "Paris", "list": ["a", true]}')]),
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_an_answer_is_read(name: str, text: str, expected: Answer):
    assert read(text, name) == expected


HARMONY_CASES = [
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
        Answer("Hello.", "Hm."),
    ),
    ("<|channel|>final<|message|>Hello.", Answer("Hello.")),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        Answer("", "Hm.", [PARIS]),
    ),
    (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        Answer("", "", [PARIS]),
    ),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.add <|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>commentary "
        "to=functions.add<|message|>{}<|call|>",
        Answer("I look.", "", [ADD, ADD]),
    ),
    ("No channel at all.", Answer("No channel at all.")),
    ("<|channel|>analysis<|message|>cut", Answer("", "cut")),
    ("<|channel|>analysis", Answer()),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY_CASES)
def test_harmonys_channels_dont_leak(text: str, expected: Answer):
    assert read(text, "harmony", "harmony") == expected


def test_harmonys_channels_dont_leak_without_tools():
    text, expected = HARMONY_CASES[0]
    assert read(text, None, "harmony") == expected
    assert read(text, "harmony", "harmony", mode="off") == expected
    call_text, _ = HARMONY_CASES[2]
    assert read(call_text, "harmony", "harmony", mode="off") == Answer('{"city": "Paris"}', "Hm.")


def test_the_first_call_of_each_format_streams_its_name_before_it_is_over():
    parser = reader("hermes").parser()
    events = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa')
    assert fold(events).calls == [call("get_weather", '{"city": "Pa')]
    parser = reader("qwen3_coder").parser()
    events = parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nA long te")
    assert fold(events).calls == [call("get_weather", '{"city": "A long te')]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_with_tool_choice_none_calls_are_text(name: str):
    for form, text, _ in CASES:
        if form == name:
            assert read(text, name, mode="off") == Answer(text)


def test_only_the_first_call_is_told_where_calls_arent_parallel():
    text = (
        '<tool_call>{"name": "get_weather", "arguments": {"city": '
        '"Paris"}}</tool_call>\n<tool_call>{"name": "add"}'
    )
    assert read(text, "hermes", parallel=False).calls == [PARIS]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, " 1.5 ", 1.5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "x", "x"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/$defs/text"}, "1", "1"),
        ({"$ref": "#/$defs/loop"}, "1", 1),
        ({"type": "array", "items": {"type": "string"}}, "['a', \"b\"]", ["a", "b"]),
        ({"type": "object"}, '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({"type": "object"}, "{broken", "{broken"),
        ({}, "1", 1),
        ({}, '"quoted"', '"quoted"'),
        ({}, "text", "text"),
        ({}, "NaN", "NaN"),
    ],
)
def test_values_get_the_types_of_the_tools_schema(kind: dict, value: str, expected: object):
    schema = {
        "type": "object",
        "properties": {"a": kind},
        "$defs": {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    answer = read(text, "glm", schemas={"f": schema})
    assert json.loads(answer.calls[0].arguments) == {"a": expected}


MARKS = sorted({marker for form in TOOL_FORMATS.values() for marker in form.markers})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(deadline=None, max_examples=120)
@given(data=st.data(), thinking=st.sampled_from([None, "think"]), cuts=st.sets(st.integers(1, 300)))
def test_any_text_can_be_read_however_it_is_cut(name: str, data: st.DataObject, thinking, cuts):
    form = TOOL_FORMATS[name]
    own = [*form.markers, *(text for one, text, _ in CASES if one == name), "<think>", "</think>"]
    words = [
        *own,
        *TOOLS,
        *"{}[]()\"'\\:,;=<>/ \nan1",
        '{"name": "add", "arguments": {',
        "call:",
        "functions.",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=30)))
    made = reader(name, thinking)
    assert joined(pieces_read(made, cut(text, cuts))) == joined(pieces_read(made, [text]))


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_long_answers_take_time_by_their_length(name: str):
    """More than 100,000 characters in small pieces: one long call, and markers that come to nothing."""
    form, opener = TOOL_FORMATS[name], (*TOOL_FORMATS[name].opens, "[")[0]
    first = next((text for one, text, _ in CASES if one == name), opener)
    long = first.replace("Paris", "Paris " * 20_000) if "Paris" in first else first + " word" * 24_000
    for text in (long, (opener + " ") * (120_000 // (len(opener) + 1)), "".join(form.markers) * 2_000):
        pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
        begun = time.process_time()
        pieces_read(reader(name), pieces)
        pieces_read(reader(name), [text])
        assert time.process_time() - begun < 5.0
