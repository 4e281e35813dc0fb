"""The official client, unchanged, over a real socket."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.scripted_engine import ScriptedEngine

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def sync_client(live_url: str) -> OpenAI:
    return OpenAI(base_url=f"{live_url}/v1", api_key="unused", max_retries=0)


@pytest.fixture
def async_client(live_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{live_url}/v1", api_key="unused", max_retries=0)


def test_chat(sync_client: OpenAI) -> None:
    whole = sync_client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=9)
    chunks = list(
        sync_client.chat.completions.create(
            model="scripted",
            messages=HELLO,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_completions(sync_client: OpenAI) -> None:
    whole = sync_client.completions.create(model="scripted", prompt=["ab", "cd"], max_tokens=9, n=2)
    texts = dict.fromkeys(range(4), "")
    for chunk in sync_client.completions.create(
        model="scripted", prompt=["ab", "cd"], max_tokens=9, n=2, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text

    assert texts == {choice.index: choice.text for choice in whole.choices}


async def test_async_chat_and_completions(async_client: AsyncOpenAI) -> None:
    whole = await async_client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=5)
    stream = await async_client.chat.completions.create(
        model="scripted", messages=HELLO, max_tokens=5, stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    plain = await async_client.completions.create(model="scripted", prompt=[65, 66], max_tokens=5)

    assert text == whole.choices[0].message.content
    assert plain.usage is not None
    assert plain.usage.total_tokens == 7


def test_extra_fields_go_through_extra_body(sync_client: OpenAI, engine: ScriptedEngine) -> None:
    sync_client.completions.create(
        model="scripted", prompt="ab", extra_body={"top_k": 3, "cache_salt": "me", "ignore_eos": True}
    )

    assert engine.requests[-1].params.top_k == 3
    assert engine.requests[-1].namespace.salt == "me"


def test_models(sync_client: OpenAI) -> None:
    assert [model.id for model in sync_client.models.list()] == ["scripted"]
    assert sync_client.models.retrieve("scripted").id == "scripted"


def test_errors_become_the_clients_own_exceptions(sync_client: OpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.NotFoundError):
        sync_client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as bad:
        sync_client.completions.create(model="scripted", prompt="")
    assert bad.value.param == "prompt"
    engine.script.overloaded = True
    with pytest.raises(openai.InternalServerError):
        sync_client.completions.create(model="scripted", prompt="x")
    engine.script.overloaded = False
    engine.script.fail_after = 1
    with pytest.raises(openai.APIError):
        list(sync_client.completions.create(model="scripted", prompt="x", stream=True))
