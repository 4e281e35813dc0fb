"""MindIE's own ``/infer`` and ``/infer_token``."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
from tests.server.scripted_engine import ScriptedEngine


async def test_text_in_text_out(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    parameters = {"max_new_tokens": 6, "details": True, "priority": 1}
    response = await client.post("/infer", json={"inputs": "ab", "parameters": parameters})

    reply = engine.reply_ids(engine.requests[0], 0)
    body = response.json()
    assert body["generated_text"] == engine.tokenizer.decode(reply)
    details = body["details"]
    assert details["stemma"]["cached_tokens"] == 0
    assert details | {"stemma": None} == {
        "finish_reason": "length",
        "generated_tokens": 6,
        "generated_token_ids": reply,
        "seed": None,
        "stemma": None,
    }
    again = await client.post("/infer", json={"inputs": "ab"})
    assert again.json().keys() == {"generated_text"}
    assert again.headers["x-stemma-cached-tokens"] == "1"


@pytest.mark.parametrize("path", ["/infer", "/infer_token"])
async def test_token_ids_in(client: httpx.AsyncClient, engine: ScriptedEngine, path: str) -> None:
    ids = engine.tokenizer.encode("abc").tolist()
    response = await client.post(path, json={"input_id": ids, "parameters": {"truncate": 2}})

    assert response.status_code == 200
    assert engine.requests[0].prompt_token_ids.tolist() == ids[1:]


async def test_stream(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"inputs": "ab", "stream": True, "parameters": {"max_new_tokens": 4, "details": True}}
    response = await client.post("/infer", json=body)

    events = [orjson.loads(line[6:]) for line in response.text.split("\n\n") if line]
    reply = engine.reply_ids(engine.requests[0], 0)
    assert [event["token"]["id"] for event in events] == [[each] for each in reply]
    assert [event["prefill_time"] is None for event in events] == [False, True, True, True]
    assert [event["decode_time"] is None for event in events] == [True, False, False, False]
    assert events[-1]["generated_text"] == "".join(event["token"]["text"] for event in events)
    assert events[-1]["details"]["generated_token_ids"] == reply
    assert response.headers["x-stemma-cached-tokens"] == "0"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": "a", "input_id": [1]}, "Input conflict"),
        ({}, "Contains not prompt"),
        ({"inputs": ""}, "the prompt is empty"),
        ({"input_id": []}, "input_id"),
        ({"input_id": [-1]}, "input_id"),
        ({"input_id": [1, "2"]}, "input_id"),
        ({"input_id": [2**31 - 1]}, "out of the vocabulary"),
        ({"inputs": "a", "parameters": {"priority": 6}}, "priority"),
        ({"inputs": "a", "parameters": {"timeout": 0}}, "timeout"),
        ({"inputs": "a", "parameters": {"best_of": 2, "temperature": 1.0}}, "best_of is not supported"),
        ({"inputs": "a", "parameters": {"return_full_text": True}}, "return_full_text is not supported"),
    ],
)
async def test_bad_input(client: httpx.AsyncClient, body: dict[str, Any], message: str) -> None:
    response = await client.post("/infer", json=body)

    assert response.status_code == 422
    assert message in response.json()["error"]
    assert response.json()["error_type"] == "Input Validation Error"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_own_timeout_ends_a_request(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script.delay_s = 0.4
    body = {"inputs": "ab", "stream": stream, "parameters": {"max_new_tokens": 50, "timeout": 1}}
    response = await client.post("/infer", json=body)

    assert "longer than its own timeout" in response.text
    assert response.status_code == (200 if stream else 424)
    assert engine.active == set()
    assert engine.aborted == [engine.requests[0].request_id]
