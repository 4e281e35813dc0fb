"""Fields that clients of other servers send: they work as those servers document them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from stemma.config.settings import Settings
from stemma.server.app import create_app
from stemma.types import RetentionHint, RetentionRange
from tests.server.scripted_engine import ScriptedEngine

USER = [{"role": "user", "content": "Hello"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


def app_client(engine: ScriptedEngine, settings: Settings, **server: Any) -> httpx.AsyncClient:
    changed = settings.server.model_copy(update=server)
    app = create_app(engine, settings.model_copy(update={"server": changed}))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}, {"model": "tgi"}, {"model": "dummy"}])
async def test_the_model_may_be_left_out(client: httpx.AsyncClient, model: dict[str, Any]) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": USER})):
        response = await client.post(path, json={**model, **body})
        assert (response.status_code, response.json()["model"]) == (200, "scripted")


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "refusal": "I won't."},
        {"role": "assistant", "content": None, "refusal": "I won't."},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
    ],
)
async def test_assistant_turns_without_content(client: httpx.AsyncClient, turn: dict[str, Any]) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": [*USER, turn, *USER]})
    assert response.status_code == 200, response.text


async def test_a_refusal_is_what_the_assistant_said(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    turn = {"role": "assistant", "refusal": "I won't."}
    await client.post("/v1/chat/completions", json={"messages": [*USER, turn]})
    assert "I won't." in engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist())


async def test_echo_without_new_tokens(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"prompt": ["ab", "cd"], "echo": True, "max_tokens": 0, "n": 2}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "cd", "cd"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 0)
    assert engine.requests == []
    assert (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 0})).status_code == 400


async def test_best_of_in_chat_and_tgi(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"messages": USER, "n": 1, "best_of": 3, "temperature": 1.0, "max_tokens": 5}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert (len(answer["choices"]), engine.requests[-1].params.n) == (1, 3)
    assert answer["choices"][0]["logprobs"] is None
    parameters = {"best_of": 3, "do_sample": True, "details": True, "max_new_tokens": 5}
    tgi = (await client.post("/generate", json={"inputs": "x", "parameters": parameters})).json()
    assert engine.requests[-1].params.n == 3
    assert tgi["details"]["generated_tokens"] == len(tgi["details"]["tokens"]) == 5
    for path, wrong in (
        ("/v1/chat/completions", {**body, "stream": True}),
        ("/v1/chat/completions", {**body, "temperature": 0}),
        ("/generate_stream", {"inputs": "x", "parameters": parameters}),
    ):
        assert (await client.post(path, json=wrong)).status_code in (400, 422)


async def test_counts_are_rounded_to_blocks(engine: ScriptedEngine, settings: Settings) -> None:
    """So a client that guesses another's prompt learns nothing from one more right token."""
    size = settings.engine.cache.block_size
    text = "x" * (2 * size + 7)
    async with app_client(engine, settings, report_granularity="block") as client:
        await client.post("/v1/completions", json={"prompt": text + "A"})
        for shared, reported in ((2 * size + 5, 2 * size), (size, size), (size - 1, 0)):
            answer = (await client.post("/v1/completions", json={"prompt": text[:shared] + "B"})).json()
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == reported
            assert sum(usage["stemma"]["cached_tokens_by_tier"].values()) == reported
            assert usage["stemma"]["miss_detail"] is None
        generated = await client.post("/generate", json={"inputs": text[: size + 3] + "C"})
        assert int(generated.headers["x-stemma-cached-tokens"]) == size


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_a_time_limit(engine: ScriptedEngine, settings: Settings, stream: bool) -> None:
    engine.script.delay_s = 0.05
    async with app_client(engine, settings, request_timeout_s=0.2) as client:
        body = {"prompt": "x", "max_tokens": 500, "stream": stream}
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == (200 if stream else 408)
    assert "the request took more than 0.2 s" in response.text
    assert engine.active == set()


async def test_ranges_of_the_prompt_have_hints_of_their_own(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    kept = [
        {"num_tokens": 4, "priority": 90, "cache_ttl_s": 3600.0},
        {"num_tokens": 9, "cache_ttl_s": 60.0},
    ]
    body = {"prompt": "x", "priority": 20, "cache_retention": kept}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    request = engine.requests[-1]
    assert request.retention.ranges == (
        RetentionRange(4, RetentionHint(90, 3600.0)),
        RetentionRange(9, RetentionHint(50, 60.0)),
    )
    assert request.retention.rest.priority == 20

    answer = await client.post("/v1/completions", json=body | {"cache_retention": kept[::-1]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_retention"
    answer = await client.post("/v1/completions", json=body | {"cache_retention": [{"num_tokens": 0}]})
    assert answer.status_code == 400


@pytest.mark.parametrize(("side", "kept"), [(None, "ef"), ("left", "ef"), ("right", "ab")])
async def test_a_prompt_is_cut_on_the_side_that_is_asked_for(
    client: httpx.AsyncClient, engine: ScriptedEngine, side: str | None, kept: str
) -> None:
    cut = {"truncate_prompt_tokens": 2, "truncation_side": side, "max_tokens": 1}
    assert (await client.post("/v1/completions", json={"prompt": "abcdef", **cut})).status_code == 200
    assert engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist()) == kept
    chat = {"messages": USER, **cut}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    assert len(engine.requests[-1].prompt_token_ids) == 2


async def test_a_long_prompt_that_is_cut_fits(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"inputs": "x" * 20_000}
    parameters = {"truncate": 3, "max_new_tokens": 2}
    response = await client.post("/generate", json={**body, "parameters": parameters})
    assert response.status_code == 200, response.text
    assert len(engine.requests[-1].prompt_token_ids) == 3
    without = await client.post("/generate", json={**body, "parameters": {"max_new_tokens": 2}})
    assert without.status_code in (413, 422), without.text


async def test_vllms_generate_takes_its_sampling_params(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = {
        "prompt": "abcdef",
        "truncate_prompt_tokens": 4,
        "max_tokens": 5,
        "min_tokens": 2,
        "logit_bias": {"3": -1.5},
        "allowed_token_ids": [3, 4],
        "bad_words": ["no"],
    }
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    request = engine.requests[-1]
    assert len(request.prompt_token_ids) == 4
    params = request.params
    assert (params.min_tokens, params.logit_bias, params.allowed_token_ids) == (2, ((3, -1.5),), (3, 4))
    assert params.bad_words
    shaped = {"prompt": "x", "structured_outputs": {"regex": "[a-z]+"}}
    assert (await client.post("/generate", json=shaped)).status_code == 200
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "regex"
    wide = {**shaped, "use_beam_search": True, "best_of": 2, "temperature": 0}
    assert (await client.post("/generate", json=wide)).status_code == 422


async def test_responses_take_what_vllms_clients_send(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = {
        "input": "Hello",
        "stop": ["END"],
        "stop_token_ids": [7],
        "logit_bias": {"3": 2.0},
        "skip_special_tokens": False,
        "structured_outputs": {"choice": ["yes", "no"]},
    }
    assert (await client.post("/v1/responses", json=body)).status_code == 200
    params = engine.requests[-1].params
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("END",), (7,), ((3, 2.0),))
    assert params.grammar is not None
    assert not params.skip_special_tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 4}),
    ],
)
async def test_a_watermark_is_refused(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    assert (await client.post(path, json={**body, "watermarking": False})).status_code == 200
    refused = await client.post(path, json={**body, "watermarking": True})
    assert refused.status_code == 400
    assert "watermarking is not supported" in refused.text
