"""Answers come back over every API, and get the ids that were generated as far as their text agrees."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.scripted_engine import ScriptedEngine

from stemma.config.settings import Settings
from stemma.server.app import create_app
from stemma.server.door.keyfile import add_key

QUESTION = {"role": "user", "content": "How deep is the river?"}
NEXT = {"role": "user", "content": "And then?"}
REPLY = "The river is deep, and the water is cold."


def spelled(engine: ScriptedEngine, text: str) -> list[int]:
    """The ids that the scripted engine writes for a text."""
    pieces = (engine.tokenizer.encode(char, add_special_tokens=False).tolist() for char in text)
    return [token_id for piece in pieces for token_id in piece]


def holds(engine: ScriptedEngine, text: str) -> bool:
    """Whether the newest prompt has a text with the ids that were written."""
    prompt, wanted = engine.requests[-1].prompt_token_ids.tolist(), spelled(engine, text)
    return any(prompt[at : at + len(wanted)] == wanted for at in range(len(prompt)))


def reads(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist(), skip_special_tokens=False)


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def chat(client: httpx.AsyncClient, messages: list[Any], **body: Any) -> dict[str, Any]:
    return await post(client, "/v1/chat/completions", messages=messages, max_tokens=300, **body)


def exact(answer: dict[str, Any]) -> int:
    found: int = answer["usage"].get("stemma", {}).get("exact_history_tokens", 0)
    return found


async def over_chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    first = await chat(client, [QUESTION], **body)
    return await chat(client, [QUESTION, first["choices"][0]["message"], NEXT], **body)


async def over_streams(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.post(
        "/v1/chat/completions", json={"messages": [QUESTION], "max_tokens": 300, "stream": True}
    )
    lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return await chat(client, [QUESTION, {"role": "assistant", "content": text}, NEXT])


async def over_messages(client: httpx.AsyncClient) -> dict[str, Any]:
    first = await post(client, "/v1/messages", messages=[QUESTION], max_tokens=300)
    turn = {"role": "assistant", "content": first["content"]}
    return await post(client, "/v1/messages", messages=[QUESTION, turn, NEXT], max_tokens=300)


async def over_responses(client: httpx.AsyncClient) -> dict[str, Any]:
    first = await post(client, "/v1/responses", input=[QUESTION], store=False)
    return await post(client, "/v1/responses", input=[QUESTION, *first["output"], NEXT], store=False)


APIS = [over_chat, over_streams, over_messages, over_responses]


@pytest.mark.parametrize("converse", APIS)
async def test_an_answer_that_comes_back_has_its_ids(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    converse: Callable[[httpx.AsyncClient], Awaitable[dict[str, Any]]],
) -> None:
    engine.script.reply = REPLY
    second = await converse(client)
    assert holds(engine, REPLY)
    assert exact(second) == len(spelled(engine, REPLY))
    first = engine.requests[0].prompt_token_ids
    assert engine.requests[1].prompt_token_ids[: len(first)].tolist() == first.tolist()
    assert reads(engine).count(REPLY) == 1


async def test_it_crosses_apis(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.reply = REPLY
    first = await post(client, "/v1/messages", messages=[QUESTION], max_tokens=300)
    turn = {"role": "assistant", "content": first["content"][0]["text"]}
    assert exact(await chat(client, [QUESTION, turn, NEXT]))


async def test_all_answers_of_a_long_conversation(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    messages: list[dict[str, Any]] = [QUESTION]
    written = 0
    for number in range(4):
        engine.script.reply = f"{REPLY} That was answer {number}."
        answer = await chat(client, messages)
        assert exact(answer) == written
        written += len(spelled(engine, engine.script.reply))
        messages += [answer["choices"][0]["message"], NEXT]
    for before, after in zip(engine.requests, engine.requests[1:], strict=False):
        head = after.prompt_token_ids[: len(before.prompt_token_ids)]
        assert head.tolist() == before.prompt_token_ids.tolist()


async def test_each_of_several_answers(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.spelled = False  # words, others for each sequence
    first = await chat(client, [QUESTION], n=2, return_token_ids=True)
    for choice in first["choices"]:
        second = await chat(client, [QUESTION, choice["message"], NEXT])
        assert exact(second) == len(choice["token_ids"])


async def test_a_call_that_the_template_writes_as_the_model_did(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    engine.script.reply = '<tool_call>\n{"name": "look", "arguments": {"at": "the river"}}\n</tool_call>'
    first = await chat(client, [QUESTION], tools=tools)
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "cold"}
    second = await chat(client, [QUESTION, message, result], tools=tools)
    assert exact(second) == len(spelled(engine, engine.script.reply))


async def test_a_call_that_the_template_writes_otherwise(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    engine.script.reply = '<tool_call>\n{"name": "look", "arguments": {"at":"the river"}}\n</tool_call>'
    first = await chat(client, [QUESTION], tools=tools)
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "cold"}
    second = await chat(client, [QUESTION, message, result], tools=tools)
    agreed = '<tool_call>\n{"name": "look", "arguments": {"at":'
    assert exact(second) == len(spelled(engine, agreed))
    assert '{"at": "the river"}' in reads(engine)


@pytest.mark.parametrize("opens", [False, True])
async def test_thinking_stays_while_the_template_keeps_it(
    client: httpx.AsyncClient, engine: ScriptedEngine, opens: bool
) -> None:
    given = {"chat_template_kwargs": {"opens_thinking": opens}}
    thought = "I know this river.\n</think>\n\n"
    engine.script.reply = thought + REPLY if opens else f"<think>\n{thought}{REPLY}"
    message = (await chat(client, [QUESTION], **given))["choices"][0]["message"]
    assert message["reasoning_content"] == "I know this river."
    kept = await chat(client, [QUESTION, message, {"role": "tool", "content": "cold"}], **given)
    assert exact(kept) >= len(spelled(engine, engine.script.reply))
    assert f"<think>\n{thought}{REPLY}" in reads(engine)
    left_out = await chat(client, [QUESTION, message, NEXT], **given)
    assert exact(left_out) == 0
    assert "I know this river." not in reads(engine)


async def test_a_stop_string_keeps_the_ids_before_it(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """What the client has is shorter than what was generated."""
    engine.script.reply = REPLY
    await chat(client, [QUESTION])
    head = REPLY[: REPLY.index(", and")]
    second = await chat(client, [QUESTION, {"role": "assistant", "content": head}, NEXT])
    assert exact(second) == len(spelled(engine, head))
    assert holds(engine, head)


async def test_an_edited_answer_is_cut_beside_a_word(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = REPLY
    await chat(client, [QUESTION])
    second = await chat(client, [QUESTION, {"role": "assistant", "content": "The rivers are deep."}, NEXT])
    assert exact(second) == len(spelled(engine, "The "))  # never in the middle of a word
    assert "The rivers are deep." in reads(engine)


async def test_a_continued_answer_is_whole(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """One that its limit cut, and that the next request goes on with."""
    engine.script.reply = REPLY
    first = await post(client, "/v1/chat/completions", messages=[QUESTION], max_tokens=12)
    message = first["choices"][0]["message"]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    second = await chat(client, [QUESTION, message], **body)
    assert exact(second) == 12
    assert engine.requests[-1].prompt_token_ids[-12:].tolist() == spelled(engine, REPLY)[:12]


async def test_who_does_not_share_blocks_shares_no_answers(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = REPLY
    first = await chat(client, [QUESTION], cache_salt="a", exact_history=True)
    messages = [QUESTION, first["choices"][0]["message"], NEXT]
    for body in ({}, {"cache_salt": "a"}, {"cache_salt": "b", "exact_history": True}):
        assert exact(await chat(client, messages, **body)) == 0, body
    assert exact(await chat(client, messages, cache_salt="a", exact_history=True))


async def test_tenants_share_no_answers(engine: ScriptedEngine, settings: Settings, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    heads = [{"authorization": f"Bearer {add_key(keys, name)}"} for name in ("ann", "bob")]
    server = settings.server.model_copy(update={"api_keys_file": keys})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    engine.script.reply = REPLY
    transport = httpx.ASGITransport(app=app)
    found: list[dict[str, Any]] = []
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for head in (heads[0], heads[1], heads[0]):
            messages = [QUESTION] if not found else [QUESTION, found[0]["choices"][0]["message"], NEXT]
            body = {"messages": messages, "max_tokens": 300}
            answer = await client.post("/v1/chat/completions", json=body, headers=head)
            assert answer.status_code == 200, answer.text
            found.append(answer.json())
    assert [exact(one) > 0 for one in found] == [False, False, True]


async def test_off_for_a_server(engine: ScriptedEngine, settings: Settings) -> None:
    server = settings.server.model_copy(update={"exact_history": "off"})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    engine.script.reply = REPLY
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert exact(await over_chat(client, exact_history=True)) == 0
        assert "stemma_history" not in (await client.get("/metrics")).text
    assert not holds(engine, REPLY)


async def test_counts_agree_with_the_prompt(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.reply = REPLY
    first = await post(client, "/v1/messages", messages=[QUESTION], max_tokens=300)
    turns = [QUESTION, {"role": "assistant", "content": first["content"]}, NEXT]
    counted = await post(client, "/v1/messages/count_tokens", messages=turns)
    await post(client, "/v1/messages", messages=turns, max_tokens=300)
    assert counted["input_tokens"] == len(engine.requests[-1].prompt_token_ids)


async def test_metrics_count_what_is_kept(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.reply = REPLY
    await over_chat(client)
    text = (await client.get("/metrics")).text
    assert "stemma_history_answers 2.0" in text
    assert "stemma_history_evicted_total 0.0" in text
