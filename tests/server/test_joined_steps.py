"""Streams tell the same whether tokens of several steps leave one by one or together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest

from tests.server.scripted_engine import ScriptedEngine

Events = list[dict[str, Any]]
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


async def _stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Events:
    response = await client.post(url, json=body)
    assert response.status_code == 200, response.text
    lines = [line for part in response.text.split("\n") for line in part.split("\0")]
    found = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return [orjson.loads(line) for line in found]


async def _both(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str, body: dict[str, Any]
) -> tuple[Events, Events]:
    apart = await _stream(client, url, body)
    engine.requests.clear()  # else the second finds the first's prompt in the cache
    engine.script.joined = 3
    return apart, await _stream(client, url, body)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/generate_stream", {"inputs": "ab", "parameters": {"max_new_tokens": 23, "details": True}}),
        ("/", {"inputs": "ab", "stream": True, "parameters": {"max_new_tokens": 23}}),
    ],
)
async def test_one_event_a_token_where_the_protocol_says_so(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str, body: dict[str, Any]
) -> None:
    apart, together = await _both(client, engine, url, body)

    assert len(apart) == 23
    for event in (*apart, *together):
        for name in ("prefill_time", "decode_time"):
            if name in event:
                event[name] = event[name] is None
    assert together == apart


def _completion(events: Events) -> Any:
    sums: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event.get("choices", ())):
        mine = sums.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "ends": []})
        mine["text"] += choice["text"]
        mine["ids"] += choice.get("token_ids") or []
        mine["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
        mine["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return sums, events[-1].get("usage")


def _chat(events: Events) -> Any:
    sums: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event.get("choices", ())):
        mine = sums.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "ends": []})
        mine["text"] += choice["delta"].get("content") or ""
        mine["ids"] += choice.get("token_ids") or []
        mine["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        mine["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return sums, events[-1].get("usage")


def _responses(events: Events) -> Any:
    text = "".join(event["delta"] for event in events if event["type"].endswith("output_text.delta"))
    return text, events[-1]["response"]["usage"], events[-1]["type"]


def _messages(events: Events) -> Any:
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas), events[-2]["usage"], events[-2]["delta"]


def _vllm(events: Events) -> Any:
    return "".join(text for event in events for text in event["text"])


@pytest.mark.parametrize(
    ("url", "body", "fold"),
    [
        ("/v1/completions", {"prompt": "ab", "n": 2, "max_tokens": 23, "stream": True}, _completion),
        (
            "/v1/completions",
            {"prompt": "ab", "max_tokens": 23, "stream": True, "logprobs": 2, "return_token_ids": True},
            _completion,
        ),
        ("/v1/chat/completions", {**CHAT, "n": 2, "max_tokens": 23}, _chat),
        (
            "/v1/chat/completions",
            {**CHAT, "max_tokens": 23, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
            _chat,
        ),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 23, "stream": True}, _responses),
        ("/v1/messages", {**CHAT, "max_tokens": 23}, _messages),
        ("/generate", {"prompt": "ab", "max_tokens": 23, "stream": True}, _vllm),
    ],
)
async def test_fewer_events_with_the_same_sum(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    url: str,
    body: dict[str, Any],
    fold: Callable[[Events], Any],
) -> None:
    if url in ("/v1/completions", "/v1/chat/completions"):
        body = {**body, "stream_options": {"include_usage": True}}
    apart, together = await _both(client, engine, url, body)

    assert len(together) < len(apart) - 5
    assert fold(together) == fold(apart)


async def test_tool_calls_and_reasoning_do_not_depend_on_it(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = '{"name": "look", "arguments": {"at": "日本, naïve"}}'
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {**CHAT, "max_tokens": 200, "tools": [tool], "tool_choice": "required"}
    apart, together = await _both(client, engine, "/v1/chat/completions", body)

    def calls(events: Events) -> tuple[str, list[str]]:
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        return (
            "".join(function["arguments"] for function in functions),
            [function["name"] for function in functions if "name" in function],
        )

    assert calls(together) == calls(apart)
    assert together[-1]["choices"][0]["finish_reason"] == apart[-1]["choices"][0]["finish_reason"]


async def test_an_error_ends_a_joined_stream_behind_its_tokens(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.fail_after = 6
    body = {"prompt": "ab", "max_tokens": 23, "stream": True}
    apart, together = await _both(client, engine, "/v1/completions", body)

    assert "error" in together[-1]
    assert together[-1] == apart[-1]
    first = [event["choices"][0]["text"] for event in apart[:-1]]
    assert "".join(event["choices"][0]["text"] for event in together[:-1]) == "".join(first)
