"""Arguments of calls that are no JSON, or not quite: always an object, the same one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.server.answers.events import CallArguments, CallStart
from stemma.server.apis.messages.output import ContentBlocks
from stemma.server.turn.call_arguments import (
    MAX_REPAIRED_CHARS,
    UNREADABLE,
    ControlEscapes,
    arguments_text,
    call_arguments,
)

OBJECTS = st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers(-9, 9), max_size=3)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (" ", {}),
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
        ('{"a": "cut', {"a": "cut"}),
        ('{"a": [1, ', {"a": [1]}),
        ('{"a": 1} and more', {"a": 1}),
        ("[1]", {"input": "[1]"}),
        ("no JSON", {"input": "no JSON"}),
        ('{"a": NaN}', {"input": '{"a": NaN}'}),
        ("\ud800", {"input": "?"}),
    ],
)
def test_arguments_are_an_object(text: str, found: dict[str, Any]) -> None:
    assert call_arguments(text) == found


def test_what_is_too_large_to_be_built_stays_text() -> None:
    for text in ('{"a":' * 100 + "1", "[" * 100_000, '{"a": "' + "x\n" * MAX_REPAIRED_CHARS):
        assert call_arguments(text) == {"input": text}


@given(OBJECTS, st.integers(0, 200))
def test_a_call_that_was_cut_keeps_what_was_complete(arguments: dict[str, Any], at: int) -> None:
    text = json.dumps(arguments)
    cut = call_arguments(text[:at])
    assert cut.keys() <= arguments.keys()
    assert cut == call_arguments(text[:at])
    assert call_arguments(text) == arguments


@given(OBJECTS)
def test_text_is_kept_as_it_was_written_where_it_is_json(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments, indent=1)
    assert arguments_text(text, arguments) == text
    assert json.loads(arguments_text(text[:-1], arguments)) == arguments


def test_arguments_beyond_the_bounds_of_json_are_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A string of empty arrays inside a body is no way around the bounds of the body."""
    text = "[" + ",".join(["[]"] * 60_000) + "]"
    monkeypatch.setattr("orjson.loads", lambda _: pytest.fail("it was built"))
    arguments = call_arguments(text)
    assert json.loads(arguments_text(text, arguments)) == arguments == {UNREADABLE: text}


@given(OBJECTS, st.integers(1, 7))
def test_control_characters_are_escaped_however_the_text_is_cut(arguments: dict[str, Any], step: int) -> None:
    text = json.dumps(arguments, indent=1, ensure_ascii=False)
    raw = text.replace("\\n", "\n").replace("\\t", "\t") if "\\\\" not in text else text
    escapes = ControlEscapes()
    told = "".join(escapes.feed(raw[at : at + step]) for at in range(0, len(raw), step))
    assert json.loads(told) == arguments
    if raw == text:
        assert told == text


def test_the_events_of_a_message_hold_json_that_clients_can_read() -> None:
    blocks = ContentBlocks(with_thinking=False)
    told = blocks.feed([CallStart(0, "f"), CallArguments(0, '{"a": "x\n'), CallArguments(0, 'y"}')])
    told += blocks.end()
    pieces = [each["delta"]["partial_json"] for each in told if each["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"a": "x\ny"} == blocks.blocks[0]["input"]
