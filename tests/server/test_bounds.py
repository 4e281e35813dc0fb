"""What a client sends is bounded before anything is built from it: 4xx, at once, and others go on."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.config.settings import Settings
from stemma.errors import InvalidRequest
from stemma.server.app import create_app
from stemma.server.schemas.bounds import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH
from stemma.server.schemas.json_input import parse_json
from tests.server.scripted_engine import ScriptedEngine

USER = [{"role": "user", "content": "Hello"}]
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_ttl_s", 1e300),
        ("cache_ttl_s", 10**400),
        ("cache_ttl_s", 0),
        ("priority", -1),
        ("max_tokens", 2**31),
        ("max_tokens", -1),
        ("min_tokens", 2**40),
        ("temperature", 1e9),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 2**40),
        ("min_p", 2),
        ("n", 10**30),
        ("best_of", 10**30),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("frequency_penalty", 3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e300),
        ("length_penalty", 1e300),
        ("logprobs", 21),
        ("stop", ["x"] * 1025),
        ("stop", "x" * 1025),
        ("stop", ["y" * 1000] * 33),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [1] * 1025),
        ("cache_salt", "s" * 129),
        ("model", "m" * 257),
        ("user", "u" * 257),
        ("prompt", ["x"] * 1025),
        ("prompt", [[1]] * 1025),
        ("prompt", [1] * 5000),
    ],
)
async def test_fields_of_completions(client: httpx.AsyncClient, field: str, value: Any) -> None:
    content = json.dumps({"prompt": "x", field: value}).encode()
    response = await client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400, response.text
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "r" * 65, "content": "x"}]}),
        ("/v1/chat/completions", {"messages": USER * 8193}),
        ("/v1/chat/completions", {"messages": USER, "tools": [{}] * 1025}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "name": "n" * 2_000_000}]}),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"description": "d" * 2_000_000}]}),
        ("/v1/chat/completions", {"messages": USER, "top_logprobs": 10**30, "logprobs": True}),
        ("/generate", {"inputs": "x" * 2_000_000, "parameters": {"truncate": 1}}),
        ("/generate", {"inputs": "x", "parameters": {"truncate": 2**31}}),
        ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 2**31}}),
        ("/generate", {"inputs": "x", "parameters": {"repetition_penalty": 1e300}}),
        ("/generate", {"inputs": "x", "parameters": {"top_k": 2**40}}),
        ("/generate", {"inputs": "x", "parameters": [1]}),
        ("/generate", {"prompt": "x", "seed": 2**70}),
        ("/generate", {"prompt": "x", "top_p": 1e300}),
        ("/admin/cache/pin", {"prompt": "x", "ttl_s": 1e300}),
        ("/admin/cache/prewarm", {"prompt": "x", "ttl_s": 1e300}),
        ("/admin/cache/prewarm", {"prompt": [2**70]}),
        ("/admin/cache/prewarm", {"prompt": "x", "priority": 101}),
        ("/admin/cache/lookup", {"prompt": "x", "cache_salt": "s" * 129}),
        ("/admin/cache/unpin", {"pin_id": "p" * 257}),
    ],
)
async def test_fields_of_other_planes(
    engine: ScriptedEngine, settings: Settings, path: str, body: dict[str, Any]
) -> None:
    server = settings.server.model_copy(update={"max_body_bytes": 2**26})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post(path, json=body)
    assert response.status_code in (400, 422), response.text
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt":[' + b",".join([b"[5]"] * 100_000) + b"]}",
        b'{"prompt":"x","stop":[' + b",".join([b"1"] * 1_500_000) + b"]}",
        b'{"prompt":[' + b",".join([b"[]"] * 3_000_000) + b"]}",
        b'{"prompt":"x","unknown":{' + b",".join(b'"%d":{}' % n for n in range(100_000)) + b"}}",
    ],
    ids=["prompts", "stops", "empty lists", "empty objects"],
)
async def test_many_small_elements_do_not_stop_the_server(
    engine: ScriptedEngine, settings: Settings, content: bytes
) -> None:
    server = settings.server.model_copy(update={"max_body_bytes": 2**26})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - begun)

    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        watcher = asyncio.create_task(watch())
        response = await client.post("/v1/completions", content=content, headers=JSON)
        watcher.cancel()
    assert response.status_code == 400, response.text
    assert longest < 1.0  # seconds before the bounds; tens of ms now


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='a,:[]{}"\\', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def _num_values(value: Any) -> int:
    """Values in containers, and keys: what the scan counts."""
    if isinstance(value, dict):
        return 1 + sum(1 + _num_values(item) for item in value.values())
    if isinstance(value, list):
        return 1 + sum(_num_values(item) for item in value)
    return 1


@given(json_values, st.integers(1, 40))
def test_the_scan_never_lets_too_many_values_pass(value: Any, limit: int) -> None:
    """Separators inside strings don't count; a value passes if and only if it is about small enough."""
    data = orjson.dumps(value)
    try:
        parsed = parse_json(data, max_values=limit)
    except InvalidRequest:
        is_refused = True
    else:
        is_refused = False
        assert parsed == value
    num_values = _num_values(value)
    assert 2 * num_values > limit if is_refused else num_values <= 2 * limit + 1


def test_depth_and_containers() -> None:
    deepest = b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH
    parse_json(deepest)
    for data in (b"[" + deepest + b"]", b'{"a":' * 1000 + b"1" + b"}" * 1000, b"[" * 100_000):
        with pytest.raises(InvalidRequest):
            parse_json(data)
    text = b'"' + b"[{,:" * MAX_JSON_CONTAINERS * 2 + b'\\\\\\""'
    assert parse_json(b"[" + text + b"]")[0].endswith('\\"')
    with pytest.raises(InvalidRequest, match="objects and arrays"):
        parse_json(b"[" + text + b",[]" * (MAX_JSON_CONTAINERS + 1) + b"]")


async def test_deep_nesting_inside_a_message(client: httpx.AsyncClient) -> None:
    nested = '{"a":' * 900 + "1" + "}" * 900
    body = '{"messages":[{"role":"user","content":"x","extra":' + nested + "}]}"
    response = await client.post("/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code == 400, response.text
    call = {"function": {"name": "f", "arguments": nested}}
    body = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    response = await client.post("/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code == 200, "as text: a history is never refused"


async def test_unknown_fields_are_logged_once(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        body = {"prompt": "x", "temprature": 0.5, "user": "somebody", "metadata": {}}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    logged = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert len(logged) == 1
    assert "temprature" in logged[0]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *(
            ("/v1/completions", field, value)
            for field, value in {
                "suffix": "end",
                "structured_outputs": {"structural_tag": "x"},
                "prompt_logprobs": 21,
                "return_tokens_as_token_ids": True,
            }.items()
        ),
        *(
            ("/v1/chat/completions", field, value)
            for field, value in {
                "modalities": ["text", "audio"],
                "audio": {"voice": "x"},
                "web_search_options": {},
                "echo": True,
                "chat_template": "{{ 1 }}",
                "chat_template_kwargs": {"chat_template": "{{ 1 }}"},
            }.items()
        ),
        ("/generate", "parameters", {"grammar": {"type": "json"}}),
        ("/generate", "parameters", {"top_n_tokens": 3}),
        ("/generate", "parameters", {"n": 2}),
        ("/generate", "parameters", {"use_beam_search": True}),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(
    client: httpx.AsyncClient, path: str, field: str, value: Any
) -> None:
    base = (
        {"messages": USER} if "chat" in path else {"inputs": "x"} if "generate" in path else {"prompt": "x"}
    )
    response = await client.post(path, json={**base, field: value})
    assert response.status_code in (400, 422), response.text
    name = next(iter(value)) if field == "parameters" else field
    assert name in response.text


async def test_neutral_values_of_unsupported_fields_pass(client: httpx.AsyncClient) -> None:
    neutral = {
        "logit_bias": {},
        "suffix": None,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "x"},
        "store": True,
    }
    response = await client.post("/v1/chat/completions", json={"messages": USER, **neutral})
    assert response.status_code == 200, response.text
