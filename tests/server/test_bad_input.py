"""Every kind of wrong request, in each API's own error shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.scripted_engine import ScriptedEngine

JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [[]]}, 400, "prompt"),
        ({"prompt": ["ok", ""]}, 400, "prompt"),
        ({"prompt": ["ok", 1]}, 400, "prompt"),
        ({"prompt": [True, False]}, 400, "prompt"),
        ({"prompt": 7}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": [5, 10**6]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [5, 2**40]}, 400, "prompt"),
        ({"prompt": [5, 2**70]}, 400, "prompt"),
        ({"prompt": "x" * 5000}, 400, "prompt"),
        ({"prompt": "x", "model": "other"}, 404, "model"),
        ({"prompt": "x", "max_tokens": "12"}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, 400, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "x", "top_p": 0}, 400, "top_p"),
        ({"prompt": "x", "n": 10_000}, 400, "n"),
        ({"prompt": "x", "n": 257}, 400, "n"),
        ({"prompt": "x", "n": 0}, 400, "n"),
        ({"prompt": "x", "n": 1.5}, 400, "n"),
        ({"prompt": "x", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "x", "prompt_logprobs": -1}, 400, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 1, "use_beam_search": True}, 400, "prompt_logprobs"),
        ({"prompt": "x", "max_tokens": 0, "echo": True, "stream": True}, 400, "max_tokens"),
        ({"prompt": "x", "stop": [1]}, 400, "stop[0]"),
        ({"prompt": "x", "stop": ""}, 400, "stop"),
        ({"prompt": "x", "stream": "yes"}, 400, "stream"),
        ({"prompt": "x", "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
        ({"prompt": "x", "logit_bias": {"5": 101.0}}, 400, "logit_bias"),
        ({"prompt": "x", "use_beam_search": True, "n": 11}, 400, "n"),
        ({"prompt": "x", "use_beam_search": True, "n": 3, "best_of": 2}, 400, "best_of"),
        ({"prompt": "x", "use_beam_search": True, "stop": "."}, 400, "stop"),
        ({"prompt": "x", "use_beam_search": True, "min_tokens": 2}, 400, "min_tokens"),
        ({"prompt": "x", "use_beam_search": True, "presence_penalty": 1}, 400, "presence_penalty"),
        ({"prompt": "x", "use_beam_search": True, "length_penalty": 1e9}, 400, "length_penalty"),
        ({"prompt": "x", "suffix": "end"}, 400, "suffix"),
        ({"prompt": "x", "priority": 101}, 400, "priority"),
    ],
)
async def test_completions(client: httpx.AsyncClient, body: dict[str, Any], status: int, param: str) -> None:
    response = await client.post("/v1/completions", json={"model": "scripted", **body})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), response.text
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ],
)
async def test_chat(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await client.post("/v1/chat/completions", json={"model": "scripted", **body})

    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": ""},
        {"inputs": 5},
        {"inputs": [{"type": "image_url"}]},
        {"inputs": "x", "parameters": {"temperature": 0}},
        {"inputs": "x", "parameters": {"top_p": 1.0}},
        {"inputs": "x", "parameters": {"max_new_tokens": 0}},
        {"inputs": "x", "parameters": {"max_new_tokens": "20"}},
        {"inputs": "x", "parameters": {"stop": [""]}},
        {"inputs": "x", "parameters": {"stop": ["y" * 1000] * 33}},
        {"inputs": "x", "parameters": {"watermark": True}},
        {"inputs": "x", "parameters": {"seed": -1}},
        {"inputs": "x" * 5000},
        {"prompt": ""},
        {"prompt": "x", "n": 1000},
    ],
)
async def test_generate(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await client.post("/generate", json=body)

    assert response.status_code == 422, response.text
    assert response.json()["error_type"] == "Input Validation Error"


async def test_generate_needs_inputs_or_prompt(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", json={"text": "x"})

    assert response.status_code == 422
    assert response.json()["error"]["error_type"] == "validation"


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b'"text"', b"\xff", b'{"prompt": NaN}'])
async def test_body_that_is_no_json_object(client: httpx.AsyncClient, content: bytes) -> None:
    openai = await client.post("/v1/completions", content=content, headers=JSON)
    tgi = await client.post("/generate", content=content, headers=JSON)

    assert (openai.status_code, openai.json()["error"]["type"]) == (400, "invalid_request_error")
    assert (tgi.status_code, tgi.json()["error_type"]) == (422, "Input Validation Error")


async def test_body_too_large(client: httpx.AsyncClient) -> None:
    body = {"model": "scripted", "prompt": "x" * 300_000}

    async def chunks():
        for _ in range(300):
            yield b"x" * 1000

    assert (await client.post("/v1/completions", json=body)).status_code == 413
    assert (await client.post("/v1/completions", content=chunks(), headers=JSON)).status_code == 413


async def test_unknown_fields_are_ignored(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/v1/completions", json={"model": "scripted", "prompt": "x", "from_the_future": {"a": 1}}
    )

    assert response.status_code == 200


async def test_prompt_that_the_cache_can_never_hold(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.capacity_tokens = 10
    body = {"model": "scripted", "prompt": "x" * 11}
    for stream in (False, True):
        response = await client.post("/v1/completions", json={**body, "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert (await client.post("/generate", json={"inputs": "x" * 11})).status_code == 422


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_says_when_to_come_back(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script.overloaded = True
    openai = await client.post(
        "/v1/completions", json={"model": "scripted", "prompt": ["x", "y"], "stream": stream}
    )
    tgi = await client.post("/", json={"inputs": "x", "stream": stream})

    assert (openai.status_code, openai.headers["retry-after"]) == (503, "3")
    assert openai.json()["error"]["code"] == "queue_full"
    assert (tgi.status_code, tgi.headers["retry-after"]) == (503, "3")
    assert tgi.json()["error_type"] == "Service Unavailable"


async def test_draining_engine_refuses(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.draining = True
    openai = await client.post("/v1/completions", json={"model": "scripted", "prompt": "x"})
    tgi = await client.post("/generate", json={"inputs": "x"})

    assert (openai.status_code, openai.json()["error"]["code"]) == (503, "shutting_down")
    assert tgi.status_code == 503
    assert "retry-after" in openai.headers


async def test_engine_failure(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.fail_after = 0
    openai = await client.post("/v1/completions", json={"model": "scripted", "prompt": "x"})
    tgi = await client.post("/generate", json={"inputs": "x"})

    assert (openai.status_code, openai.json()["error"]["type"]) == (500, "server_error")
    assert (tgi.status_code, tgi.json()) == (424, {"error": "step failed", "error_type": "Generation Error"})


async def test_unknown_path_and_method(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v2/nothing")).json()["error"]["type"] == "invalid_request_error"
    assert (await client.get("/v1/completions")).status_code == 405


async def test_a_bug_is_a_500_without_details(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.tokenizer = None  # type: ignore[assignment]
    response = await client.post("/v1/completions", json={"model": "scripted", "prompt": "x"})

    assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error")


async def test_a_text_far_too_long_is_not_even_tokenized(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.max_model_len = 4
    monkeypatch.setattr(engine.tokenizer, "encode", None)
    for path, body in (
        ("/v1/completions", {"prompt": "x" * 2000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 2000}]}),
    ):
        response = await client.post(path, json={"model": "scripted", **body})
        assert response.json()["error"]["code"] == "context_length_exceeded"
