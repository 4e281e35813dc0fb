"""The tokenizer over HTTP."""

from __future__ import annotations

import httpx
import pytest

from stemma import __version__
from tests.server.scripted_engine import ScriptedEngine


async def test_vllms_tokenize_and_back(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"model": "scripted", "prompt": "naïve", "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()

    ids = engine.tokenizer.encode("naïve").tolist()
    assert (answer["count"], answer["tokens"], answer["max_model_len"]) == (len(ids), ids, 4096)
    assert len(answer["token_strs"]) == len(ids)
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "naïve"}


async def test_a_conversation_is_counted_as_chat_completions_sees_it(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    counted = (await client.post("/tokenize", json={"messages": messages})).json()
    await client.post("/v1/chat/completions", json={"model": "scripted", "messages": messages})

    assert counted["tokens"] == engine.requests[0].prompt_token_ids.tolist()


async def test_tgis_tokenize_names_the_characters(client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"inputs": "ab"})).json()

    assert [(each["text"], each["start"], each["stop"]) for each in tokens] == [("a", 0, 1), ("b", 1, 2)]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "inputs": "b"}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/tokenize", {"prompt": "a" * 150_000}, 200),
        ("/tokenize", {"messages": []}, 400),
        ("/detokenize", {"tokens": [10**6]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": "abc"}, 400),
    ],
)
async def test_bad_input(client: httpx.AsyncClient, path: str, body: dict[str, object], status: int) -> None:
    assert (await client.post(path, json=body)).status_code == status


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}
