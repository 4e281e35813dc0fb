"""``/v1/messages`` over the scripted engine: shapes, streams, marks, keys, refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from stemma.config.settings import Settings
from stemma.server.answers.events import CallArguments, CallStart, Content, Reasoning
from stemma.server.apis.messages.blocks import chat_messages
from stemma.server.apis.messages.output import ContentBlocks
from stemma.server.app import create_app
from stemma.server.schemas.messages import CountTokensRequest
from stemma.types import NO_HINT, RetentionHint, RetentionRange
from tests.server.scripted_engine import ScriptedEngine

HELLO = [{"role": "user", "content": "Hello"}]


async def create(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/messages", json={"max_tokens": 9, "messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_an_answer(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    found = await create(client, system="Be short.", model="scripted")

    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "max_tokens")
    [block] = found["content"]
    assert block["type"] == "text"
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist())
    assert prompt == "<|system|>Be short.\n<|user|>Hello\n<|assistant|>"
    assert engine.requests[-1].roles == ("system", "user")
    usage = found["usage"]
    assert usage["input_tokens"] == len(engine.requests[-1].prompt_token_ids)
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (0, 0)
    assert usage["output_tokens"] == 9
    counted = await client.post("/v1/messages/count_tokens", json={"messages": HELLO, "system": "Be short."})
    assert counted.json() == {"input_tokens": usage["input_tokens"]}


async def test_a_stream_tells_the_same_with_anthropics_events(client: httpx.AsyncClient) -> None:
    whole = await create(client)
    answer = await client.post("/v1/messages", json={"max_tokens": 9, "messages": HELLO, "stream": True})
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"

    names = [each["type"] for each in events]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * names.count("content_block_delta"),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert last["output_tokens"] == 9
    prompt_tokens = first["input_tokens"] + first["cache_read_input_tokens"]
    assert first["cache_read_input_tokens"] == prompt_tokens - 1


def marked(text: str, **control: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", **control}}


async def test_marks_become_hints_and_written_tokens(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    system = "You know everything about rivers. " * 4
    first = await create(client, system=[marked(system, ttl="1h")])

    request = engine.requests[-1]
    usage = first["usage"]
    written = usage["cache_creation_input_tokens"]
    assert request.retention.ranges == (RetentionRange(written, RetentionHint(70, 3600.0)),)
    assert request.retention.rest == NO_HINT
    assert len(system) <= written < len(request.prompt_token_ids)
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": written}
    assert usage["input_tokens"] + written == len(request.prompt_token_ids)

    second = await create(
        client,
        system=[marked(system)],
        messages=[{"role": "user", "content": [marked("Which is longest?")]}],
    )
    usage, request = second["usage"], engine.requests[-1]
    assert {one.hint.ttl_s for one in request.retention.ranges} == {300.0}
    assert request.retention.ranges[-1].num_tokens == len(request.prompt_token_ids)
    assert usage["cache_read_input_tokens"] >= len(system)
    assert usage["input_tokens"] == 0
    assert usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == len(
        request.prompt_token_ids
    )


async def test_each_mark_keeps_what_lies_before_it(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    turns = [
        {"role": "user", "content": [marked("Which river is longest?", ttl="1h")]},
        {"role": "assistant", "content": "The Nile."},
        {"role": "user", "content": [marked("And which is widest?")]},
        {"role": "assistant", "content": "The Amazon."},
        {"role": "user", "content": "Why?"},
    ]
    answer = await create(client, system=[marked("You know rivers. " * 3)], messages=turns)
    request = engine.requests[-1]
    first, second, third = request.retention.ranges
    assert [one.hint.ttl_s for one in request.retention.ranges] == [3600.0, 3600.0, 300.0]
    assert 0 < first.num_tokens < second.num_tokens < third.num_tokens < len(request.prompt_token_ids)
    assert answer["usage"]["cache_creation"] == {
        "ephemeral_5m_input_tokens": third.num_tokens - second.num_tokens,
        "ephemeral_1h_input_tokens": second.num_tokens,
    }


async def test_hints_of_the_request_itself_win(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    await create(client, system=[marked("x")], priority=5, cache_ttl_s=7.0)

    request = engine.requests[-1]
    assert request.retention.rest == RetentionHint(5, 7.0)
    assert {one.hint for one in request.retention.ranges} == {RetentionHint(5, 7.0)}


def test_turns_become_messages() -> None:
    body = CountTokensRequest.model_validate(
        {
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "messages": [
                {"role": "user", "content": "2+2?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "I add."},
                        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "4", "is_error": True},
                        {"type": "text", "text": "Go on."},
                    ],
                },
            ],
        }
    )
    function = {"name": "add", "arguments": '{"a":2}'}
    assert chat_messages(body) == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: 4"},
        {"role": "user", "content": "Go on."},
    ]


def test_the_last_turn_may_be_the_answers_beginning() -> None:
    blocks = ContentBlocks(with_thinking=True)
    told = blocks.feed(
        [Reasoning("h"), Reasoning("m"), Content("a"), CallStart(0, "add"), CallArguments(0, '{"a": [1, ')]
    )
    told += blocks.end()

    assert [block["type"] for block in blocks.blocks] == ["thinking", "text", "tool_use"]
    assert blocks.blocks[0]["thinking"] == "hm"
    assert blocks.blocks[2]["input"] == {"a": [1]}, "a call that was cut off keeps what was complete"
    starts = [each["index"] for each in told if each["type"] == "content_block_start"]
    assert starts == [each["index"] for each in told if each["type"] == "content_block_stop"] == [0, 1, 2]


def test_thinking_is_left_out_unless_asked_for() -> None:
    blocks = ContentBlocks(with_thinking=False)
    blocks.feed([Reasoning("hm"), Content("a")])
    blocks.end()

    assert blocks.blocks == [{"type": "text", "text": "a"}]


RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [marked("x")] * 5}
SEEN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].source"),
        ({"messages": [{"role": "user", "content": [SEEN]}]}, "this model reads no images"),
        ({"system": [marked("x")] * 5}, "at most 4"),
        ({"system": [marked("x", ttl="2h")]}, "system[0].cache_control"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "at most 4"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"kv_transfer_params": {"url": "x"}}, "kv_transfer_params"),
        ({"output_config": {"format": {"type": "poem"}}}, "output_config.format"),
        ({"temperature": 1.5}, "temperature"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages"])
async def test_what_does_not_work_is_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], word: str
) -> None:
    answer = await client.post(path, json={"max_tokens": 9, "messages": HELLO, **body})

    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert word in answer.json()["error"]["message"]


async def test_errors_have_anthropics_shape(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"max_tokens": 9, "messages": HELLO}
    wrong = await client.post("/v1/messages", json={**body, "model": "claude"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")
    engine.script.overloaded = True
    busy = await client.post("/v1/messages", json=body)
    assert (busy.status_code, busy.json()["error"]["type"]) == (529, "overloaded_error")
    assert busy.headers["retry-after"] == "3"
    engine.script.overloaded = False
    engine.script.fail_after = 2
    failed = await client.post("/v1/messages", json=body)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")
    stream = await client.post("/v1/messages", json={**body, "stream": True})
    last = stream.text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
        ({}, 401),
    ],
)
async def test_the_key_may_come_as_anthropics_clients_send_it(
    engine: ScriptedEngine, settings: Settings, headers: dict[str, str], status: int
) -> None:
    server = settings.server.model_copy(update={"api_key": "secret"})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
        answer = await http.post("/v1/messages", json={"max_tokens": 3, "messages": HELLO})
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"
