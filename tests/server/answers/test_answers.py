"""Answers as the served families write them; how the text is cut into pieces changes nothing."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import ConfigError
from stemma.server.answers.chat import AnswerReader, ToolUse
from stemma.server.answers.events import Answer, ToolCall, fold, parse
from stemma.server.answers.families import TOOL_FORMATS, AnswerFormat, answer_format
from stemma.server.answers.reasoning import prompt_opens_reasoning

TOOLS = ("get_weather", "add")
WEATHER = '{"city": "Paris \\"}{ [x]", "units": {"t": "C"}}'
TEXTS = {
    "hermes": [
        "Let me look.\n<tool_call>\n" + f'{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        f'<tool_call>{{"arguments": {WEATHER}, "name": "get_weather"}}</tool_call>\n<tool_call>\n'
        '{"name": "add", "arguments": {}}\n</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        "<tool_call>no json</tool_call> and <tool_ca",
        "plain < text with <tool and spaces  ",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
    ],
    "llama3_json": [
        f'{{"name": "get_weather", "parameters": {WEATHER}}}',
        f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}; '
        '{"name": "add", "parameters": {"a": 1}}',
        '{"name": "Ada", "born": 1815}',
        '{"answer": 42}',
        "It is 7 < 8.",
        "<|python",
    ],
    "mistral": [
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, '
        '{"name": "add", "arguments": {}}]',
        f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{{}}",
        f"Well. [TOOL_CALLS]get_weather{WEATHER}",
        "[TOOL_CALLS] nothing",
        "[TOOL_",
    ],
    "deepseek": [
        "Right.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        + WEATHER
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "no calls here",
    ],
}
CASES = [(name, text) for name, texts in TEXTS.items() for text in texts]


def answer_parser(name: str | None, *, reasoning: bool, opened: bool):
    tools = TOOL_FORMATS[name] if name else None
    use = ToolUse({tool: {} for tool in TOOLS}, "auto")
    return AnswerReader(AnswerFormat(tools, reasoning), use, opened).parser()


def read(name: str | None, pieces: list[str], *, reasoning: bool = False, opened: bool = False) -> Answer:
    parser = answer_parser(name, reasoning=reasoning, opened=opened)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return fold([*events, *parser.end()])


def whole(name: str, text: str) -> Answer:
    return parse(answer_parser(name, reasoning=False, opened=False), text)


@pytest.mark.parametrize(("name", "text"), [(name, TEXTS[name][0]) for name in TEXTS])
def test_the_first_call_of_each_family_is_read(name: str, text: str):
    answer = whole(name, text)
    assert answer.calls[0] == ToolCall("get_weather", WEATHER)
    assert json.loads(answer.calls[0].arguments)["city"] == 'Paris "}{ [x]'


@pytest.mark.parametrize(
    ("name", "number"), [("hermes", 1), ("llama3_json", 1), ("mistral", 0), ("mistral", 1), ("deepseek", 0)]
)
def test_several_calls_are_numbered(name: str, number: int):
    answer = whole(name, TEXTS[name][number])
    assert [call.name for call in answer.calls] == ["get_weather", "add"]
    assert answer.calls[0].arguments == WEATHER


def test_both_of_deepseeks_formats_are_read_alike():
    assert whole("deepseek", TEXTS["deepseek"][1]).calls == whole("deepseek", TEXTS["deepseek"][0]).calls


def test_text_around_calls_is_content_without_the_gap():
    assert whole("hermes", TEXTS["hermes"][0]).content == "Let me look."
    assert whole("deepseek", TEXTS["deepseek"][0]).content == "Right."
    assert whole("mistral", TEXTS["mistral"][2]) == Answer("Well.", "", [ToolCall("get_weather", WEATHER)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", TEXTS["hermes"][5]),
        ("llama3_json", TEXTS["llama3_json"][2]),
        ("llama3_json", TEXTS["llama3_json"][3]),
        ("llama3_json", TEXTS["llama3_json"][4]),
        ("llama3_json", TEXTS["llama3_json"][5]),
        ("mistral", "[TOOL_"),
        ("deepseek", TEXTS["deepseek"][2]),
    ],
)
def test_text_that_is_no_call_is_content_to_the_letter(name: str, text: str):
    assert whole(name, text) == Answer(content=text)


def test_a_call_without_arguments_has_an_empty_object():
    assert whole("hermes", TEXTS["hermes"][2]).calls == [ToolCall("add", "{}")]


def test_arguments_that_are_a_string_of_json_are_unwrapped():
    assert whole("hermes", TEXTS["hermes"][6]).calls == [ToolCall("add", '{"a": 1}')]


def test_a_call_that_ends_early_keeps_what_it_has():
    assert whole("hermes", TEXTS["hermes"][3]).calls == [ToolCall("get_weather", '{"city": "Par')]


def test_a_malformed_call_is_content():
    answer = whole("hermes", TEXTS["hermes"][4])
    assert answer == Answer(content=TEXTS["hermes"][4])


def test_arguments_are_streamed_before_the_call_is_over():
    parser = answer_parser("hermes", reasoning=False, opened=False)
    events = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa')
    assert fold(events).calls == [ToolCall("get_weather", '{"city": "Pa')]


@settings(deadline=None, max_examples=300)
@given(
    case=st.sampled_from(CASES), cuts=st.sets(st.integers(1, 200)), reasoning=st.booleans(), data=st.data()
)
def test_the_pieces_dont_matter(case, cuts, reasoning, data):
    name, text = case
    opened = reasoning and data.draw(st.booleans())
    if reasoning:
        text = (
            data.draw(st.sampled_from(["<think>\nhm <th\n\n</think>\n\n", "why\n</think>", "\n", ""])) + text
        )
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    assert read(name, pieces, reasoning=reasoning, opened=opened) == read(
        name, [text], reasoning=reasoning, opened=opened
    )


@settings(deadline=None, max_examples=200)
@given(name=st.sampled_from(sorted(TOOL_FORMATS)), text=st.text(alphabet='<>{}[]":,; tool_calTOLCARGS/n\\\n'))
def test_any_text_can_be_read(name: str, text: str):
    read(name, list(text), reasoning=True)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\nParis.", False, Answer("Paris.", "hm")),
        ("hm\n</think>\n\nParis.", True, Answer("Paris.", "hm")),
        ("<think>\nhm</think>Paris.", True, Answer("Paris.", "hm")),
        ("<think>\n\n</think>\n\nParis.", False, Answer("Paris.", "")),
        ("Paris <think>.", False, Answer("Paris <think>.", "")),
        ("still thinking", True, Answer("", "still thinking")),
        ("<think>cut off", False, Answer("", "cut off")),
        ("</thin", True, Answer("", "</thin")),
    ],
)
def test_reasoning_is_split_off(text: str, opened: bool, expected: Answer):
    assert read(None, [text], reasoning=True, opened=opened) == expected
    assert read(None, list(text), reasoning=True, opened=opened) == expected


def test_the_prompt_tells_whether_the_reasoning_is_open():
    assert prompt_opens_reasoning("<|Assistant|><think>\n")
    assert not prompt_opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not prompt_opens_reasoning("what is <think><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("...'<tool_call>\\n{\"name\": ' ...", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("{{- '<|python_tag|>' }}", "llama3_json"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_template_chooses_the_format(template: str | None, name: str | None):
    expected = TOOL_FORMATS[name] if name else None
    assert answer_format("auto", "auto", template) == AnswerFormat(expected, reasoning=False)


def test_settings_override_the_template():
    assert answer_format("mistral", "on", "<tool_call>") == AnswerFormat(
        TOOL_FORMATS["mistral"], reasoning=True
    )
    assert answer_format("off", "off", "<tool_call> <think>") == AnswerFormat(None, reasoning=False)
    assert answer_format("auto", "auto", "... <think> ...").reasoning
    with pytest.raises(ConfigError, match="hermes"):
        answer_format("hermse", "auto", None)
    with pytest.raises(ConfigError, match="auto, on or off"):
        answer_format("auto", "maybe", None)
