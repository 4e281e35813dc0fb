"""What clients send beside the question: hints, narrowed tools, counts; and errors in their words."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.openai_requests import counted
from tests.server.scripted_engine import ScriptedEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "buy", "sell")
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "extra", "field"),
    [
        ("/v1/chat/completions", {"verbosity": "low"}, "verbosity"),
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("/v1/responses", {"text": {"verbosity": "high"}}, "text.verbosity"),
        ("/v1/responses", {"max_tool_calls": 3}, "max_tool_calls"),
        ("/v1/responses", {"context_management": [{"type": "compaction"}]}, "context_management"),
        ("/v1/responses", {"reasoning": {"effort": "high"}}, "reasoning_effort"),
        (
            "/v1/responses",
            {"include": ["message.output_text.logprobs"]},
            "include.message.output_text.logprobs",
        ),
        ("/v1/responses", {"include": ["something.new"]}, "include"),
    ],
)
async def test_hints_are_accepted_and_counted(
    client: httpx.AsyncClient, path: str, extra: dict[str, Any], field: str
) -> None:
    before = await counted(client, field)
    body = CHAT if "chat" in path else {"input": "hi", "max_output_tokens": 4}
    answer = await client.post(path, json={**body, **extra})
    assert answer.status_code == 200, answer.text
    assert await counted(client, field) == before + 1


async def test_truncation_is_told_as_it_was_asked_for(client: httpx.AsyncClient) -> None:
    for given, told in ((None, "disabled"), ("auto", "auto")):
        body = {"input": "hi", "max_output_tokens": 4, "truncation": given}
        assert (await client.post("/v1/responses", json=body)).json()["truncation"] == told


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", CHAT, "maximum context length is"),
        ("/v1/completions", {"prompt": "x"}, "maximum context length is"),
        ("/v1/responses", {"input": "x"}, "maximum context length is"),
        ("/v1/messages", {**CHAT, "max_tokens": 4}, "prompt is too long"),
    ],
)
async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, body: dict[str, Any], words: str
) -> None:
    text = "word " * engine.max_model_len
    long: dict[str, Any] = {name: text for name in ("prompt", "input") if name in body}
    if "messages" in body:
        long["messages"] = [{"role": "user", "content": text}]
    answer = await client.post(path, json=body | long)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[1]]}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "buy"}]},
    ],
)
async def test_allowed_tools_narrow_what_may_be_called_and_not_what_the_prompt_shows(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: dict[str, Any]
) -> None:
    answer = await client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    request = engine.requests[-1]
    assert request.params.grammar is not None
    schema = request.params.grammar.text
    assert "buy" in schema
    assert "sell" not in schema
    with_all = await client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS})
    assert with_all.status_code == 200
    assert (engine.requests[-1].prompt_token_ids == request.prompt_token_ids).all()


@pytest.mark.parametrize(
    "allowed",
    [
        {"mode": "required", "tools": [{"type": "function", "function": {"name": "steal"}}]},
        {"mode": "always", "tools": [TOOLS[0]]},
        {"mode": "auto", "tools": []},
        {"mode": "auto"},
        "look",
    ],
)
async def test_allowed_tools_that_make_no_sense(client: httpx.AsyncClient, allowed: Any) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = await client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS, "tool_choice": choice})
    assert answer.status_code == 400
    assert "allowed_tools" in answer.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_a_schema_beside_a_forced_call_leaves_the_call(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: Any
) -> None:
    body = {**CHAT, "tools": TOOLS, "tool_choice": choice}
    answer = await client.post("/v1/chat/completions", json={**body, "response_format": SCHEMA})
    assert answer.status_code == 200, answer.text
    with_format = engine.requests[-1].params.grammar
    await client.post("/v1/chat/completions", json=body)
    assert engine.requests[-1].params.grammar == with_format
    refused = await client.post("/v1/chat/completions", json={**body, "guided_regex": "a+"})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x", "max_tokens": 4})]
)
async def test_counts_in_each_chunk(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await client.post(path, json={**body, "stream": True, "stream_options": options})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"] is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert len(set(counts)) > 2
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_a_fingerprint(client: httpx.AsyncClient, stream: bool) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x", "max_tokens": 2})):
        answer = await client.post(path, json={**body, "stream": stream})
        text = answer.text.splitlines()[0].removeprefix("data: ") if stream else answer.text
        assert json.loads(text)["system_fingerprint"].startswith("stemma-")
