"""``/v1/responses`` over the scripted engine: shapes, streams, stored conversations, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.config.settings import Settings
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.answers.events import CallArguments, CallStart, Content, Reasoning
from stemma.server.apis.responses.items import chat_messages
from stemma.server.apis.responses.output import OutputItems
from stemma.server.app import create_app
from stemma.server.door.keyfile import add_key
from stemma.server.turn.next_turn import continued
from stemma.types import NO_RETENTION, as_tokens
from tests.server.scripted_engine import ScriptedEngine


async def create(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    answer = await client.post("/v1/responses", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


async def test_a_text_becomes_a_message(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    found = await create(client, input="Hello", instructions="Be short.", max_output_tokens=9)

    assert (found["object"], found["status"]) == ("response", "incomplete")
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    [message] = found["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "incomplete")
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist())
    assert prompt == "<|system|>Be short.\n<|user|>Hello\n<|assistant|>"
    assert engine.requests[-1].roles == ("system", "user")
    usage = found["usage"]
    assert usage["input_tokens"] == len(engine.requests[-1].prompt_token_ids)
    assert usage["input_tokens_details"]["cached_tokens"] == 0
    assert usage["output_tokens"] == 9
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


async def test_a_stream_tells_the_same_with_openais_events(client: httpx.AsyncClient) -> None:
    whole = await create(client, input="Hello", max_output_tokens=9)
    events = await stream(client, input="Hello", max_output_tokens=9)

    names = [each["type"].removeprefix("response.") for each in events]
    deltas = names.count("output_text.delta")
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    text = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    assert text == text_of(whole) == text_of(last)
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == last["usage"]["input_tokens"] - 1


async def test_a_stored_conversation_is_a_cached_prefix(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    first = await create(client, input="Hello", max_output_tokens=9)
    held = first["usage"]["input_tokens"]
    second = await create(client, input="And now?", previous_response_id=first["id"], max_output_tokens=9)

    assert second["previous_response_id"] == first["id"]
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist())
    assert prompt == f"<|user|>Hello\n<|assistant|>{text_of(first)}\n<|user|>And now?\n<|assistant|>"
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= held
    assert engine.requests[-1].retention.rest.priority > 50
    assert engine.requests[-1].retention.rest.ttl_s == 3600.0

    events = await stream(client, input="More", previous_response_id=second["id"])
    third = events[-1]["response"]
    assert (await client.get(f"/v1/responses/{third['id']}")).json() == third


async def test_stored_responses_can_be_read_and_deleted(client: httpx.AsyncClient) -> None:
    first = await create(client, input="Hello")
    path = f"/v1/responses/{first['id']}"

    assert (await client.get(path)).json() == first
    assert (await client.delete(path)).json() == {"id": first["id"], "object": "response", "deleted": True}
    assert (await client.get(path)).status_code == 404
    assert (await client.delete(path)).status_code == 404
    gone = await client.post("/v1/responses", json={"input": "x", "previous_response_id": first["id"]})
    assert gone.status_code == 400
    assert gone.json()["error"]["param"] == "previous_response_id"


async def test_what_is_not_to_be_stored_is_not(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    first = await create(client, input="Hello", store=False)

    assert (await client.get(f"/v1/responses/{first['id']}")).status_code == 404
    assert engine.requests[-1].retention == NO_RETENTION


async def test_a_failure_ends_a_stream_with_an_event(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.fail_after = 2
    events = await stream(client, input="Hello")

    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "step failed"}
    assert (await client.get(f"/v1/responses/{events[-1]['response']['id']}")).status_code == 404


def test_reasoning_text_and_calls_become_items() -> None:
    items = OutputItems(None)
    told = items.feed([Reasoning("h"), Reasoning("m"), Content("I add."), CallStart(0, "add")])
    told += items.feed([CallArguments(0, '{"a"'), CallArguments(0, ": 1}")])
    told += items.end("completed")

    assert [item["type"] for item in items.items] == ["reasoning", "message", "function_call"]
    assert items.reasoning == "hm"
    assert (items.items[2]["name"], items.items[2]["arguments"]) == ("add", '{"a": 1}')
    assert {item["status"] for item in items.items} == {"completed"}
    done = [each["item"] for each in told if each["type"] == "response.output_item.done"]
    assert done == items.items
    assert [each["output_index"] for each in told] == sorted(each["output_index"] for each in told)
    [last] = [each for each in told if each["type"] == "response.function_call_arguments.done"]
    assert (last["name"], last["arguments"]) == ("add", '{"a": 1}')
    assert chat_messages(items.items)[0]["tool_calls"][0]["id"] == items.items[2]["call_id"]


def test_items_of_one_answer_become_one_message() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]
    messages = chat_messages(items)

    assert [message["role"] for message in messages] == ["developer", "user", "assistant", "tool"]
    assert messages[2]["reasoning_content"] == "hm"
    assert messages[2]["content"] == "I add."
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "4"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "custom", "name": "f", "format": 1}]}, "tools[0].format"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "poem"}}}, "text.format"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "metadata": {"a": "b" * 513}}, "metadata.a"),
    ],
)
async def test_what_does_not_work_is_refused_by_name(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    answer = await client.post("/v1/responses", json=body)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_server_that_stores_nothing(engine: ScriptedEngine, settings: Settings) -> None:
    small = settings.model_copy(update={"server": settings.server.model_copy(update={"max_responses": 0})})
    transport = httpx.ASGITransport(app=create_app(engine, small))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        first = await create(http, input="Hello")
        assert first["store"] is False
        assert (await http.get(f"/v1/responses/{first['id']}")).status_code == 404


async def test_a_stored_response_is_its_tenants_alone(
    engine: ScriptedEngine, settings: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    ada, bob = add_key(path, "ada"), add_key(path, "bob")
    server = settings.server.model_copy(update={"api_keys_file": path})
    transport = httpx.ASGITransport(app=create_app(engine, settings.model_copy(update={"server": server})))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        http.headers["authorization"] = f"Bearer {ada}"
        first = await create(http, input="Hello")
        http.headers["authorization"] = f"Bearer {bob}"
        found = f"/v1/responses/{first['id']}"
        assert (await http.get(found)).status_code == 404
        assert (await http.delete(found)).status_code == 404
        body = {"input": "x", "previous_response_id": first["id"]}
        assert (await http.post("/v1/responses", json=body)).status_code == 400
        http.headers["authorization"] = f"Bearer {ada}"
        assert (await http.get(found)).json() == first


def test_a_prompt_begins_with_the_ids_that_were_computed(tokenizer: Tokenizer) -> None:
    class Merging:
        """'ab' is one token, 300; a model may still write 'a' and 'b'."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
            return as_tokens([ord(char) for char in text.replace("ab", chr(300))])

        def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return "".join("ab" if token == 300 else chr(token) for token in ids)

    earlier, fresh = as_tokens([97, 98]), as_tokens([300, 99])
    assert continued(Merging(), earlier, fresh).tolist() == [97, 98, 99]  # type: ignore[arg-type]
    assert continued(Merging(), as_tokens([120]), fresh).tolist() == [300, 99]  # type: ignore[arg-type]
    assert continued(Merging(), as_tokens([300]), fresh).tolist() == [300, 99]  # type: ignore[arg-type]
    longer = as_tokens([97, 98, 99, 100])
    assert continued(Merging(), longer, fresh).tolist() == [97, 98, 99]  # type: ignore[arg-type]


@given(st.text(max_size=12), st.text(max_size=12), st.integers(0, 20))
def test_a_continued_prompt_keeps_its_text(
    tokenizer: Tokenizer, said: str, more: str, num_earlier: int
) -> None:
    """The byte-level tokenizer cuts characters: what the model wrote may end within one."""
    earlier = tokenizer.encode(said)[:num_earlier]
    tokens = tokenizer.encode(said + more)
    found = continued(tokenizer, earlier, tokens)

    assert found.tolist() == tokens.tolist()
