"""Blocks, items, tools and messages of any shape: spoken, skipped, or an error of ours; never another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stemma.errors import InvalidRequest
from stemma.server.answers.events import CallArguments, CallStart, Content
from stemma.server.apis.messages.blocks import chat_fields as claude_fields
from stemma.server.apis.messages.marks import marks_of
from stemma.server.apis.responses.items import chat_fields, chat_messages, tools_of
from stemma.server.apis.responses.listing import whole_items
from stemma.server.apis.responses.output import OutputItems
from stemma.server.apis.responses.tools import chosen
from stemma.server.schemas import messages, openai, responses
from stemma.server.turn.body import validate
from stemma.server.turn.template_messages import template_messages
from stemma.server.turn.template_rules import TemplateRules

TABLES = (messages.BLOCKS, messages.TOOLS, responses.ITEMS, responses.TOOLS, openai.PARTS)
KINDS = sorted({kind for table in TABLES for kind in table.spoken | table.skipped | table.refused})
NAMES = [
    "type",
    "text",
    "content",
    "role",
    "source",
    "data",
    "title",
    "name",
    "id",
    "call_id",
    "tool_use_id",
    "input",
    "arguments",
    "output",
    "tool_calls",
    "function",
    "function_call",
    "tools",
    "namespace",
    "format",
    "syntax",
    "definition",
    "action",
    "operation",
    "command",
    "thinking",
    "summary",
    "cache_control",
    "image_url",
    "refusal",
    "tool_name",
    "status",
    "reasoning",
    "reasoning_details",
    "input_schema",
    "parameters",
    "url",
]
LEAVES = st.one_of(
    st.sampled_from(
        [*KINDS, "user", "assistant", "system", "developer", "tool", "function", "grammar", "lark"]
    ),
    st.sampled_from(["", "x", "{", '{"a": "', "\ud800", None, True, 0, -1, 1.5]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)
OBJECTS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)}, optional={name: VALUES for name in NAMES if name != "type"}
)
STRICT = TemplateRules(
    system=False,
    several_system=False,
    late_system=False,
    developer=False,
    repeated_user=False,
    user_after_tool=False,
    long_ids=False,
    argument_objects=False,
    reasoning_and_text=False,
)
often = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def checked(fields: dict[str, Any]) -> None:
    """Bring what is left of a body into the form that templates take."""
    chat = validate(openai.ChatRequest, fields)
    for rules in (TemplateRules(), STRICT):
        for sees in (False, True):
            with suppress(InvalidRequest):
                found, _ = template_messages(chat.messages, sees=sees, rules=rules)
                assert all(isinstance(one["content"], str | list) for one in found)


def claude(objects: list[Any], tools: list[Any]) -> None:
    turns = [{"role": role, "content": objects} for role in ("user", "assistant", "system", "user")]
    body = {"messages": turns, "system": objects, "tools": tools, "max_tokens": 1}
    for one in (body, {**body, "system": None}, {**body, "tools": None, "system": None}):
        with suppress(InvalidRequest):
            parsed = validate(messages.MessagesRequest, one)
            with suppress(InvalidRequest):
                marks_of(parsed)
            checked(claude_fields(parsed))


def response(objects: list[Any], tools: list[Any]) -> None:
    for choice in (None, *tools, {"type": "allowed_tools", "tools": tools}):
        body = {"input": objects or "x", "tools": tools}
        with suppress(InvalidRequest):
            parsed = validate(responses.ResponsesRequest, {**body, "tool_choice": choice})
            whole_items(parsed.input)
            checked(chat_fields(parsed, chat_messages(parsed.input)))
            offered = tools_of(parsed)
            items = OutputItems(None, offered, chosen(parsed.tool_choice, offered)[1])
            for name in offered:
                items.feed([CallStart(0, name), CallArguments(0, '{"input": "x'), Content("x")])
            items.end("completed")
            chat_messages(items.items)


def chat(objects: list[Any], tools: list[Any]) -> None:
    roles = ("user", "assistant", "tool", "function", "system", "developer")
    for role in roles:
        told = [{**one, "role": role} for one in objects]
        for one in told:
            with suppress(InvalidRequest):
                checked({"messages": [one], "tools": tools})
        with suppress(InvalidRequest):
            checked({"messages": told})
    with suppress(InvalidRequest):
        checked(
            {"messages": [{"role": "user", "content": objects}], "functions": tools, "function_call": "auto"}
        )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("plane", [claude, response, chat])
@often
@given(st.lists(OBJECTS, max_size=4), st.lists(OBJECTS, max_size=2))
def test_any_object_is_taken_or_refused_by_name(
    plane: Callable[[list[Any], list[Any]], None], objects: list[Any], tools: list[Any]
) -> None:
    plane(objects, tools)
