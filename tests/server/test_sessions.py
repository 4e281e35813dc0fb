"""What clients call their conversations, in bodies and headers, reaches the engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.openai_requests import HELLO
from tests.server.scripted_engine import ScriptedEngine

CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/messages": {"model": "m", "messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/generate": {"prompt": "Hello", "max_tokens": 2},
}
IN_BODIES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


async def sessions(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, body: dict[str, Any], **headers: str
) -> str:
    named = {name.replace("__", "-"): value for name, value in headers.items()}
    sent = {**CALLS[path], **body}
    if path == "/v1/messages":
        sent["model"] = engine.model_name
    answer = await client.post(path, json=sent, headers=named)
    assert answer.status_code == 200, answer.text
    return engine.requests[-1].session


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    "header",
    ["x-dynamo-session-id", "x-claude-code-session-id", "session-id", "session_id", "X-Session-ID"],
)
async def test_headers(client: httpx.AsyncClient, engine: ScriptedEngine, path: str, header: str) -> None:
    assert await sessions(client, engine, path, {}, **{header: "mine"}) == "mine"
    assert await sessions(client, engine, path, {}) == ""


@pytest.mark.parametrize("path", IN_BODIES)
async def test_bodies_come_before_headers(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str
) -> None:
    header = {"x-session-id": "of the header"}
    assert await sessions(client, engine, path, {"session_id": "vllm's"}, **header) == "vllm's"
    assert await sessions(client, engine, path, {"prompt_cache_key": "openai's"}, **header) == "openai's"


async def test_each_agent_of_a_session_is_one(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    ids = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    assert await sessions(client, engine, "/v1/messages", {}, **ids) == "s/a"
    ids["x-dynamo-session-id"] = "d"
    assert await sessions(client, engine, "/v1/messages", {}, **ids) == "d"


async def test_a_name_that_is_too_long_is_none(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    assert await sessions(client, engine, "/generate", {}, **{"x-session-id": "x" * 257}) == ""
