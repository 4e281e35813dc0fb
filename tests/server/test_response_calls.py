"""Calls of tools that aren't functions, as items and events of a response, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.server.answers.events import CallArguments, CallStart, Content, Event, Reasoning
from stemma.server.apis.responses.items import chat_messages
from stemma.server.apis.responses.output import OutputItems
from stemma.server.apis.responses.plain_input import PlainInput
from stemma.server.apis.responses.tools import offered_tools

TOOLS: list[dict[str, Any]] = [
    {"type": "custom", "name": "apply"},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {
        "type": "namespace",
        "name": "crm",
        "description": "",
        "tools": [{"type": "function", "name": "find"}, {"type": "custom", "name": "note"}],
    },
]


def called(name: str, arguments: str, cut: int = 3) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the item of a call, and the events that tell of it."""
    items = OutputItems(None, offered_tools(TOOLS))
    pieces = [arguments[at : at + cut] for at in range(0, len(arguments), cut)]
    told = items.feed([CallStart(0, name), *(CallArguments(0, piece) for piece in pieces)])
    told += items.end("completed")
    [item] = items.items
    assert told[-1] == {"type": "response.output_item.done", "output_index": 0, "item": item}
    assert {each["item"]["id"] if "item" in each else each["item_id"] for each in told} == {item["id"]}
    return item, told


@pytest.mark.parametrize(("name", "namespace"), [("apply", None), ("crm__note", "crm")])
def test_plain_text_is_told_as_it_comes(name: str, namespace: str | None) -> None:
    text = '*** "x"\n\ttab \\ \U0001f600 end'
    item, told = called(name, json.dumps({"input": text}))
    assert (item["type"], item["input"], item.get("namespace")) == ("custom_tool_call", text, namespace)
    assert item["name"] == name.rpartition("__")[2]
    deltas = [each["delta"] for each in told if each["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == text
    assert len(deltas) > 5
    [done] = [each for each in told if each["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == text
    assert told[0]["item"]["input"] == ""


def test_a_tool_in_a_namespace_has_its_own_name() -> None:
    item, told = called("crm__find", '{"a": 1}')
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "crm", "find")
    assert item["arguments"] == '{"a": 1}'
    assert told[0]["item"]["namespace"] == "crm"


@pytest.mark.parametrize(
    ("name", "arguments", "field", "value"),
    [
        ("local_shell", {"command": ["ls"]}, "action", {"type": "exec", "env": {}, "command": ["ls"]}),
        (
            "shell",
            {"commands": ["ls"]},
            "action",
            {"timeout_ms": None, "max_output_length": None, "commands": ["ls"]},
        ),
        (
            "apply_patch",
            {"type": "delete_file", "path": "a"},
            "operation",
            {"type": "delete_file", "path": "a"},
        ),
    ],
)
def test_calls_that_openai_defines_are_told_whole_and_come_back_as_they_were_written(
    name: str, arguments: dict[str, Any], field: str, value: dict[str, Any]
) -> None:
    item, told = called(name, json.dumps(arguments))
    assert (item["type"], item[field]) == (f"{name}_call", value)
    assert [each["type"] for each in told] == ["response.output_item.added", "response.output_item.done"]
    [message] = chat_messages([item])
    [call] = message["tool_calls"]
    assert call["function"]["name"] == name
    assert json.loads(call["function"]["arguments"]) == arguments
    assert call["id"] == item["call_id"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("apply", {"input": "a\nb"}), ("crm__note", {"input": ""}), ("crm__find", {"a": 1})],
)
def test_items_come_back_as_the_calls_that_they_were(name: str, arguments: dict[str, Any]) -> None:
    item, _ = called(name, json.dumps(arguments))
    [call] = chat_messages([item])[0]["tool_calls"]
    assert call["function"]["name"] == name
    assert json.loads(call["function"]["arguments"]) == arguments


def test_a_forced_text_is_the_calls_input_and_thinking_stays_beside_it() -> None:
    offered = offered_tools(TOOLS)
    items = OutputItems(None, offered, offered["apply"])
    events: list[Event] = [Reasoning("hm"), Content('{"in'), Content("put\n")]
    told = items.feed(events) + items.end("completed")
    assert [item["type"] for item in items.items] == ["reasoning", "custom_tool_call"]
    assert items.items[1]["input"] == '{"input\n'
    assert [each["output_index"] for each in told] == sorted(each["output_index"] for each in told)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "cut', "cut"),
        ('{"input": "raw\nnewline"}', "raw\nnewline"),
        ('{"why": "x", "input": "late"}', "late"),
        ("*** no JSON", "*** no JSON"),
        ("", ""),
        ('{"input": "\\x \\u12zz"}', "\\x \\u12zz"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input": "a"} tail', "a"),
    ],
)
def test_plain_text_is_found_in_whatever_a_model_wrote(arguments: str, text: str) -> None:
    for cut in (1, 2, 1000):
        item, _ = called("apply", arguments, cut)
        assert item["input"] == text


@given(st.text(), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.booleans())
def test_plain_text_does_not_depend_on_the_cuts(text: str, cuts: list[int], is_ascii: bool) -> None:
    arguments, reader = json.dumps({"input": text}, ensure_ascii=is_ascii), PlainInput()
    found, at = "", 0
    while at < len(arguments):
        step = cuts[at % len(cuts)]
        found += reader.feed(arguments[at : at + step])
        at += step
    assert found + reader.end() == text
