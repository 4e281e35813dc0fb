from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from stemma.types import RetentionHint
from tests.server.openai_requests import complete, stream, texts_of
from tests.server.scripted_engine import ScriptedEngine


async def test_text_prompt(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    answer = await complete(client, prompt="Hello", max_tokens=6)

    [request] = engine.requests
    expected = engine.tokenizer.decode(engine.reply_ids(request, 0))
    assert request.prompt_token_ids.tolist() == engine.tokenizer.encode("Hello").tolist()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": expected, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 6


async def test_usage_names_cached_tokens_in_all_dialects(client: httpx.AsyncClient) -> None:
    await complete(client, prompt="Once upon a time")
    answer = await complete(client, prompt="Once upon a hill")

    usage = answer["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 12}
    assert (usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"]) == (12, 4)
    assert usage["stemma"] == {
        "cached_tokens_by_tier": {"device": 12},
        "miss_reason": "cold",
        "miss_detail": "never seen before",
        "queue_wait_s": 0.25,
    }


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("ab", 1), (["ab", "cd", "ef"], 3), ([65, 66], 1), ([[65], [66, 67]], 2)],
)
async def test_every_form_of_prompt(client: httpx.AsyncClient, prompt: Any, num_prompts: int) -> None:
    answer = await complete(client, prompt=prompt, n=2, max_tokens=4)

    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num_prompts))
    assert answer["usage"]["completion_tokens"] == 8 * num_prompts


async def test_many_prompts_keep_their_order_when_streamed(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 9}
    whole = await complete(client, **body)
    chunks = await stream(client, **body)

    assert texts_of(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}


@hypothesis_settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(prompt=st.text(min_size=1, max_size=40), max_tokens=st.integers(1, 40), n=st.integers(1, 3))
async def test_streamed_text_joined_is_the_whole_text(
    client: httpx.AsyncClient, prompt: str, max_tokens: int, n: int
) -> None:
    body: dict[str, Any] = {
        "prompt": prompt.encode("utf-8", "ignore").decode() or "x",
        "max_tokens": max_tokens,
        "n": n,
    }
    whole = await complete(client, **body)
    chunks = await stream(client, **body)

    assert texts_of(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}


async def test_stream_reports_usage_only_when_asked(client: httpx.AsyncClient) -> None:
    plain = await stream(client, prompt="ab", max_tokens=3)
    asked = await stream(client, prompt="ab", max_tokens=3, stream_options={"include_usage": True})

    assert all("usage" not in chunk for chunk in plain)
    assert [chunk["usage"] for chunk in asked[:-1]] == [None] * 3
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"]["prompt_cache_hit_tokens"] == 1


async def test_echo_puts_the_prompt_first(client: httpx.AsyncClient) -> None:
    whole = await complete(client, prompt=[[72, 101]], echo=True, max_tokens=3)
    plain = await complete(client, prompt=[[72, 101]], max_tokens=3)
    chunks = await stream(client, prompt=[[72, 101]], echo=True, max_tokens=3)

    assert whole["choices"][0]["text"].endswith(plain["choices"][0]["text"])
    assert len(whole["choices"][0]["text"]) > len(plain["choices"][0]["text"])
    assert texts_of(chunks) == {0: whole["choices"][0]["text"]}


async def test_logprobs(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="ab", max_tokens=3, logprobs=2)

    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
    assert [sorted(top.values()) for top in logprobs["top_logprobs"]] == [[-1.5, -0.5]] * 3


async def test_logprobs_streamed_are_those_of_the_whole(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 4, "logprobs": 1}
    whole = (await complete(client, **body))["choices"][0]["logprobs"]
    pieces = [chunk["choices"][0]["logprobs"] for chunk in await stream(client, **body)]

    for key, values in whole.items():
        assert [value for piece in pieces for value in piece[key]] == values


async def test_every_sampling_field_reaches_the_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "seed": 11,
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "max_tokens": 5,
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    await complete(
        client, prompt="ab", stop=["x", "y"], cache_salt="tenant", priority=80, cache_ttl_s=9, **fields
    )

    [request] = engine.requests
    params = {name: getattr(request.params, name) for name in fields}
    assert params == {**fields, "stop_token_ids": (3,)}
    assert request.params.stop == ("x", "y")
    assert (request.namespace.salt, request.retention.rest) == ("tenant", RetentionHint(80, 9.0))


async def test_checkpoint_defaults_fill_what_the_request_leaves_open(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.default_sampling = {"temperature": 0.6, "top_k": 20}
    await complete(client, prompt="ab", top_k=5)

    [request] = engine.requests
    assert (request.params.temperature, request.params.top_k, request.params.max_tokens) == (0.6, 5, 16)


async def test_salts_do_not_share_the_cache(client: httpx.AsyncClient) -> None:
    await complete(client, prompt="a secret", cache_salt="alice")
    other = await complete(client, prompt="a secret", cache_salt="bob")
    same = await complete(client, prompt="a secret", cache_salt="alice")

    assert other["usage"]["prompt_cache_hit_tokens"] == 0
    assert same["usage"]["prompt_cache_hit_tokens"] == 7


async def test_engine_failure_in_mid_stream_is_an_error_event(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.fail_after = 2
    chunks = await stream(client, prompt="ab", max_tokens=5)

    assert len(chunks) == 3
    assert chunks[-1]["error"]["type"] == "server_error"


@pytest.mark.parametrize("prompt", ["abcdef", [97, 98, 99, 100, 101, 102], ["abcdef"]])
async def test_a_prompt_may_be_cut_to_its_last_tokens(
    client: httpx.AsyncClient, engine: ScriptedEngine, prompt: str | list[int]
) -> None:
    found = await complete(client, prompt=prompt, truncate_prompt_tokens=2, max_tokens=1, echo=True)
    assert found["usage"]["prompt_tokens"] == 2
    expected_echo = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist())
    assert found["choices"][0]["text"].startswith(expected_echo)
    expected = [101, 102] if prompt[0] == 97 else engine.tokenizer.encode("ef").tolist()
    assert engine.requests[-1].prompt_token_ids.tolist() == expected
