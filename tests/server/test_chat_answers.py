"""Chat answers with calls and reasoning, whole and streamed, as OpenAI's API words them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from stemma.config.settings import Settings
from stemma.engine.sampling.calls import CallRules
from stemma.prefix.eviction.policy import Conclusion, Ending
from tests.server.openai_requests import CHAT_URL, HELLO, chat, stream
from tests.server.scripted_engine import ScriptedEngine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SECOND = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The model writes as Qwen3 does."""
    server = settings.server.model_copy(update={"tool_parser": "hermes", "reasoning_parser": "on"})
    return settings.model_copy(update={"server": server})


def joined(chunks: list[dict[str, Any]]) -> tuple[str, str, list[dict[str, Any]], str | None]:
    """Return content, reasoning, calls and finish reason of a stream, as clients add them up."""
    content, reasoning, finish = "", "", None
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], {"name": "", "arguments": "", "id": None})
                known["id"] = known["id"] or call.get("id")
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"].get("arguments", "")
            finish = choice["finish_reason"] or finish
    return content, reasoning, list(calls.values()), finish


async def test_calls_are_parsed(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.reply = f"I look.\n{CALL}\n{SECOND}"
    [choice] = (await chat(client, tools=TOOLS))["choices"]

    message = choice["message"]
    assert message["content"] == "I look."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "get_time"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"


async def test_calls_are_streamed(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.reply = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{SECOND}"
    chunks = await stream(client, CHAT_URL, messages=HELLO, tools=TOOLS)

    content, reasoning, calls, finish = joined(chunks)
    assert (content, reasoning, finish) == ("I look.", "hm", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {}),
    ]
    arguments = [
        call["function"]["arguments"]
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls") or ()
    ]
    assert len(arguments) > 6  # pieces, not one lump at the end


@pytest.mark.parametrize(("reply", "ending"), [(f"I look.\n{CALL}", Ending.TOOL), ("Hello.", Ending.TURN)])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_cache_is_told_who_goes_on(
    client: httpx.AsyncClient, engine: ScriptedEngine, reply: str, ending: Ending, is_streamed: bool
) -> None:
    engine.script.reply = reply
    if is_streamed:
        await stream(client, CHAT_URL, messages=HELLO, tools=TOOLS)
    else:
        await chat(client, tools=TOOLS)
    [(namespace, tokens, conclusion)] = engine.concluded
    [request] = engine.requests
    prompt = request.prompt_token_ids.tolist()
    assert namespace == request.namespace
    assert tokens[: len(prompt)] == prompt
    tools = ("get_weather",) if ending is Ending.TOOL else ()
    assert conclusion == Conclusion(ending, len(tokens) - len(prompt), tools)
    assert request.roles == tuple(message["role"] for message in HELLO)


async def test_without_parallel_calls_the_first_one_counts(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = CALL + SECOND
    [choice] = (await chat(client, tools=TOOLS, parallel_tool_calls=False))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_everything_is_content(
    client: httpx.AsyncClient, engine: ScriptedEngine, body: dict[str, Any]
) -> None:
    engine.script.reply = CALL
    [choice] = (await chat(client, **body))["choices"]
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_reasoning_is_split_unless_the_client_objects(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = "<think>hm</think>Paris."
    split, joint, without = [
        (await chat(client, **body))["choices"][0]["message"]
        for body in ({}, {"separate_reasoning": False}, {"include_reasoning": False})
    ]
    assert (split["content"], split["reasoning_content"], split["reasoning"]) == ("Paris.", "hm", "hm")
    assert joint["content"] == "<think>hm</think>Paris."
    assert without["content"] == "Paris."
    assert "reasoning" not in without


async def test_a_prompt_that_ends_inside_the_reasoning(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = "hm</think>Paris."
    messages = [*HELLO, {"role": "assistant", "content": "<think>"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    message = (await chat(client, **body))["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Paris.", "hm")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_wrong_tools_are_refused_by_name(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    response = await client.post(CHAT_URL, json={"messages": HELLO, **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" LF\n%import common.LF\n'}
TEXT_TOOL = {"type": "custom", "name": "apply", "format": PATCH}
FREE_TOOL = {"type": "function", "name": "exec", "parameters": {"type": "object"}}


async def test_a_tool_of_plain_text_that_a_model_may_choose_has_its_grammar_behind_a_calls_head(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    async def rules(tools: list[dict[str, Any]], **fields: Any) -> CallRules | None:
        answer = await client.post("/v1/responses", json={"input": "Hi", "tools": tools, **fields})
        assert answer.status_code == 200, answer.text
        return engine.requests[-1].params.calls

    assert await rules([FREE_TOOL]) is None
    assert await rules([FREE_TOOL, TEXT_TOOL], tool_choice="none") is None
    found = await rules([FREE_TOOL, TEXT_TOOL])
    assert found is not None
    assert [rule.head for rule in found.rules] == [b'<tool_call>{"name":"apply","arguments":']
    assert "@answer" in found.rules[0].rest.before
    assert engine.requests[-1].params.grammar is None
    strict = await rules([{**FREE_TOOL, "strict": True}])
    assert strict is not None
    assert [rule.head for rule in strict.rules] == [b'<tool_call>{"name":"exec","arguments":']
