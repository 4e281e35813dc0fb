"""``/v1/conversations`` and what lists the input of responses, over the scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from stemma.config.settings import Settings
from stemma.server.app import create_app
from stemma.server.door.keyfile import add_key
from tests.server.scripted_engine import ScriptedEngine


def prompt_of(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist())


async def respond(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/responses", json={"max_output_tokens": 6, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for item in items for part in item["content"]]


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_turns_go_on_from_a_conversation_and_are_added_to_it(
    client: httpx.AsyncClient, engine: ScriptedEngine, as_object: bool, stream: bool
) -> None:
    first = {"type": "message", "role": "developer", "content": "Be short."}
    made = (await client.post("/v1/conversations", json={"items": [first], "metadata": {"a": "b"}})).json()
    assert (made["object"], made["metadata"]) == ("conversation", {"a": "b"})
    name = {"id": made["id"]} if as_object else made["id"]

    await client.post("/v1/responses", json={"input": "one", "conversation": name, "stream": stream})
    said = texts((await client.get(f"/v1/conversations/{made['id']}/items?order=asc")).json()["data"])
    assert said[:2] == ["Be short.", "one"]
    second = await respond(client, input="two", conversation=name)
    assert second["conversation"] == {"id": made["id"]}
    assert prompt_of(engine).startswith(f"<|system|>Be short.\n<|user|>one\n<|assistant|>{said[2]}")
    assert prompt_of(engine).endswith("<|user|>two\n<|assistant|>")
    # The answer's own ids come back, not those of its text.
    earlier = engine.requests[-2]
    held = [*earlier.prompt_token_ids.tolist(), *engine.reply_ids(earlier, 0)]
    assert engine.requests[-1].prompt_token_ids.tolist()[: len(held)] == held[: len(held)]

    listed = (await client.get(f"/v1/conversations/{made['id']}/items?limit=2")).json()
    assert texts(listed["data"])[1] == "two"
    assert listed["has_more"]
    rest = await client.get(f"/v1/conversations/{made['id']}/items?after={listed['last_id']}")
    assert texts(rest.json()["data"]) == [said[2], "one", "Be short."]


async def test_with_the_real_client(live_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live_url}/v1", api_key="none") as client:
        made = await client.conversations.create(metadata={"topic": "test"})
        await client.responses.create(input="one", conversation=made.id, max_output_tokens=5)
        items = [item async for item in client.conversations.items.list(made.id, order="asc")]
        assert [item.type for item in items] == ["message", "message"]
        first = items[0].id
        assert first is not None
        assert (await client.conversations.items.retrieve(first, conversation_id=made.id)).id == first
        added = await client.conversations.items.create(
            made.id, items=[{"type": "message", "role": "user", "content": "two"}]
        )
        second = added.data[0].id
        assert second is not None
        await client.conversations.items.delete(second, conversation_id=made.id)
        assert len([item async for item in client.conversations.items.list(made.id)]) == 2
        changed = await client.conversations.update(made.id, metadata={"topic": "other"})
        assert changed.metadata == {"topic": "other"}
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)


async def test_the_input_of_a_response(live_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live_url}/v1", api_key="none") as client:
        one = await client.responses.create(input="one", max_output_tokens=5)
        two = await client.responses.create(input="two", previous_response_id=one.id, max_output_tokens=5)
        items = [item async for item in client.responses.input_items.list(two.id, order="asc", limit=1)]
        assert [item.role for item in items] == ["user", "assistant", "user"]  # type: ignore[union-attr]
        counted = await client.responses.input_tokens.count(input="two", previous_response_id=one.id)
        assert two.usage is not None
        assert counted.input_tokens == two.usage.input_tokens


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/conversations/conv_x", None, 404),
        ("DELETE", "/v1/conversations/conv_x", None, 404),
        ("GET", "/v1/conversations/conv_x/items", None, 404),
        ("POST", "/v1/conversations/conv_x/items", {"items": [{"role": "user", "content": "x"}]}, 404),
        ("POST", "/v1/conversations", {"items": [{"type": "item_reference"}]}, 400),
        ("POST", "/v1/conversations", {"items": [{"role": "user", "content": 7}]}, 400),
        ("POST", "/v1/responses", {"input": "x", "conversation": "conv_x"}, 400),
        ("GET", "/v1/responses/resp_x/input_items", None, 404),
    ],
)
async def test_what_is_not_there(
    client: httpx.AsyncClient, method: str, path: str, body: Any, status: int
) -> None:
    assert (await client.request(method, path, json=body)).status_code == status


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "limit=9999999999999", "order=up"])
async def test_pages_that_make_no_sense(client: httpx.AsyncClient, query: str) -> None:
    made = (await client.post("/v1/conversations", json={})).json()
    assert (await client.get(f"/v1/conversations/{made['id']}/items?{query}")).status_code == 400


async def test_a_conversation_and_a_response_before_exclude_each_other(client: httpx.AsyncClient) -> None:
    made = (await client.post("/v1/conversations", json={})).json()
    body = {"input": "x", "conversation": made["id"], "previous_response_id": "resp_x"}
    assert (await client.post("/v1/responses", json=body)).status_code == 400


async def test_tenants_see_only_their_own(engine: ScriptedEngine, settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = [add_key(file, name) for name in ("ada", "bob")]
    own = settings.server.model_copy(update={"api_keys_file": file})
    app = create_app(engine, settings.model_copy(update={"server": own}))
    first, second = ({"authorization": f"Bearer {key}"} for key in keys)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        made = (await client.post("/v1/conversations", json={}, headers=first)).json()
        path = f"/v1/conversations/{made['id']}"
        assert (await client.get(path, headers=first)).status_code == 200
        for method, where in (("GET", path), ("GET", f"{path}/items"), ("DELETE", path)):
            assert (await client.request(method, where, headers=second)).status_code == 404
        body = {"input": "x", "conversation": made["id"]}
        assert (await client.post("/v1/responses", json=body, headers=second)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_given_although_its_conversation_is_gone(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    made = (await client.post("/v1/conversations", json={})).json()
    generate = engine.generate

    async def deleting(request: Any) -> Any:
        async for output in generate(request):
            await client.delete(f"/v1/conversations/{made['id']}")
            yield output

    monkeypatch.setattr(engine, "generate", deleting)
    body = {"input": "one", "conversation": made["id"], "max_output_tokens": 5, "stream": stream}
    answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200
    last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
    told = json.loads(last)["response"] if stream else answer.json()
    assert texts(told["output"]) != [""]
    assert told["conversation"] is None
