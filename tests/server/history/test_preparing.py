"""What the server asks its engine to prepare: the common beginning of two next turns, as the request was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.scripted_engine import ScriptedEngine

from stemma.config.settings import Settings
from stemma.engine.api import GenerationRequest
from stemma.server.app import create_app
from stemma.server.door.keyfile import add_key
from stemma.server.history.preparing import BUSY_REQUESTS, REST_S

QUESTION = {"role": "user", "content": "How deep is the river?"}
USER, TOOL, ANSWER = (f"<|im_start|>{role}\n" for role in ("user", "tool", "assistant"))
REPLY = "The river is deep, and the water is cold."
CALLS = (
    '<tool_call>\n{"name": "level", "arguments": {"city": "Basel"}}\n</tool_call>'
    '<tool_call>\n{"name": "level", "arguments": {"city": "Vienna"}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "level", "parameters": {"type": "object"}}}]


async def post(client: httpx.AsyncClient, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json={"max_tokens": 300} | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def prepared(engine: ScriptedEngine, number: int = 1) -> list[GenerationRequest]:
    """Return what was prepared, once it is so much."""
    for _ in range(500):
        if len(engine.prepared) >= number:
            return engine.prepared
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was prepared")


def text(engine: ScriptedEngine, request: GenerationRequest) -> str:
    return engine.tokenizer.decode(request.prompt_token_ids.tolist(), skip_special_tokens=False)


async def test_the_turn_after_an_answer(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.reply = REPLY
    await post(client, messages=[QUESTION], cache_salt="mine", exact_history=True, priority=60)
    [found] = await prepared(engine)
    assert text(engine, found) == f"{USER}{QUESTION['content']}<|im_end|>\n{ANSWER}{REPLY}<|im_end|>\n{USER}"
    [asked] = engine.requests
    assert (found.namespace, found.retention) == (asked.namespace, asked.retention)
    assert found.prompt_token_ids.tolist()[: len(asked.prompt_token_ids)] == asked.prompt_token_ids.tolist()


async def test_the_results_of_calls(
    client: httpx.AsyncClient, engine: ScriptedEngine, settings: Settings
) -> None:
    server = settings.server.model_copy(update={"tool_parser": "hermes"})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    engine.script.reply = CALLS
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        answer = await post(http, messages=[QUESTION], tools=TOOLS)
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 2
        [found] = await prepared(engine)
    assert text(engine, found).endswith(TOOL)
    assert text(engine, found).count(TOOL) == 1  # the first result isn't known


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [QUESTION]}),
        ("/v1/responses", {"input": [QUESTION], "max_tokens": None}),
        ("/v1/chat/completions", {"messages": [QUESTION], "exact_history": False}),
    ],
)
async def test_over_every_api(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    engine.script.reply = REPLY
    await post(client, path, **body)
    [found] = await prepared(engine)
    assert text(engine, found).endswith(f"{REPLY}<|im_end|>\n{USER}")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "The river"}),
        ("/v1/chat/completions", {"messages": [QUESTION], "n": 2}),
        ("/v1/chat/completions", {"messages": [QUESTION], "truncate_prompt_tokens": 10}),
        ("/v1/chat/completions", {"messages": [QUESTION], "add_generation_prompt": False}),
    ],
)
async def test_what_has_no_next_turn(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    await post(client, path, **body)
    await asyncio.sleep(0.3)
    assert not engine.prepared


async def test_only_the_newest_turn_of_a_conversation(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = REPLY
    answer = {"role": "assistant", "content": REPLY}
    await post(client, messages=[QUESTION])
    await post(client, messages=[QUESTION, answer, QUESTION])
    await post(client, messages=[{"role": "user", "content": "Who asks?"}])
    found = await prepared(engine, 2)
    await asyncio.sleep(0.2)
    assert [text(engine, one).count(USER) for one in found] == [2, 3]  # the newest first


async def test_thinking_that_the_template_leaves_out(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = f"<think>\nI know this river.\n</think>\n\n{REPLY}"
    first = await post(client, messages=[QUESTION])
    [found] = await prepared(engine)
    assert "<think>" not in text(engine, found)
    message = first["choices"][0]["message"]
    await post(client, messages=[QUESTION, message, {"role": "user", "content": "And then?"}])
    tokens = engine.requests[-1].prompt_token_ids.tolist()
    assert tokens[: len(found.prompt_token_ids)] == found.prompt_token_ids.tolist()


async def test_in_the_namespace_of_the_tenant(
    engine: ScriptedEngine, settings: Settings, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    head = {"authorization": f"Bearer {add_key(keys, 'ann')}"}
    server = settings.server.model_copy(update={"api_keys_file": keys})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=head) as http:
        await post(http, messages=[QUESTION])
        [found] = await prepared(engine)
    assert found.namespace == engine.requests[0].namespace
    assert found.namespace.owner


async def test_nothing_begins_in_the_gaps_of_a_busy_server(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = REPLY
    for number in range(BUSY_REQUESTS):
        await post(client, messages=[{"role": "user", "content": f"Who is number {number}?"}])
    await asyncio.sleep(4 * REST_S)  # a gap, though no request is open
    assert not engine.prepared
    assert len(await prepared(engine, BUSY_REQUESTS)) == BUSY_REQUESTS


async def test_a_lone_conversation_is_prepared_in_short_gaps(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = REPLY
    messages = [QUESTION]
    for number in range(2 * BUSY_REQUESTS):
        await post(client, messages=messages)
        messages += [{"role": "assistant", "content": REPLY}, QUESTION]
        await asyncio.sleep(2 * REST_S)
        assert len(engine.prepared) == number + 1


async def test_vain_looks_become_rare(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "stemma.server.history.preparing.VAIN_LOOKS", 1
    )  # this engine has computed all before
    await post(client, messages=[QUESTION])
    await prepared(engine)
    await post(client, messages=[{"role": "user", "content": "Who asks?"}])
    await asyncio.sleep(3 * REST_S)
    assert len(engine.prepared) == 1
    assert 'stemma_prepared_turns_total{outcome="skipped"} 1.0' in (await client.get("/metrics")).text
