"""Adapters over HTTP: loaded and unloaded by the operator, listed, and selected by name in every protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from stemma.config.settings import Settings
from stemma.insight.ledger import sqlite_url, usage
from stemma.server.app import create_app
from tests.adapters import write_adapter
from tests.server.scripted_engine import ScriptedEngine

Q = "model.layers.0.self_attn.q_proj"


def adapter_in(path: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    return write_adapter(path, {Q: (torch.randn(4, 16), torch.randn(8, 4))})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    adapter_in(tmp_path / "allowed" / "sql", 1)
    adapter_in(tmp_path / "allowed" / "poems", 2)
    adapter_in(tmp_path / "other", 3)
    return tmp_path / "allowed"


@pytest.fixture
async def open_client(
    engine: ScriptedEngine, settings: Settings, folder: Path
) -> AsyncIterator[httpx.AsyncClient]:
    server = settings.server.model_copy(update={"lora_directories": (folder,)})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield http


async def load(client: httpx.AsyncClient, name: str, path: Path | str) -> httpx.Response:
    return await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


async def test_load_list_unload(open_client: httpx.AsyncClient, folder: Path) -> None:
    loaded = await load(open_client, "sql", folder / "sql")
    assert loaded.status_code == 200
    assert loaded.text == "Success: LoRA adapter 'sql' added successfully."
    cards = (await open_client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("scripted", None), ("sql", "scripted")]
    assert cards[1]["root"] == "sql"
    assert (await open_client.get("/v1/models/sql")).json() == cards[1]
    assert (await open_client.get("/v1/models/scripted")).json() == cards[0]
    gone = await open_client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert gone.status_code == 200
    assert "removed" in gone.text
    assert (await open_client.get("/v1/models/sql")).status_code == 404
    again = await open_client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert again.status_code == 404


async def test_blocks_of_an_adapter_are_published_apart(
    open_client: httpx.AsyncClient, engine: ScriptedEngine, folder: Path
) -> None:
    await load(open_client, "sql", folder / "sql")
    prompt = "You turn questions into SQL. " * 20
    made = await open_client.post("/admin/cache/publish", json={"prompt": prompt, "model": "sql"})
    assert made.status_code == 200, made.text
    prewarm = engine.requests[-1]
    assert prewarm.namespace.is_public
    assert prewarm.adapter is not None
    assert prewarm.namespace.adapter == prewarm.adapter.key == made.json()["adapter"]

    heads = []
    for model in ("sql", "scripted"):
        await open_client.post("/v1/completions", json={"model": model, "prompt": prompt + "Why?"})
        heads.append(engine.requests[-1].namespace.head)
    assert heads[0] is not None
    assert heads[1] is None
    wrong = await open_client.post("/admin/cache/publish", json={"prompt": prompt, "model": "none"})
    assert wrong.status_code == 404


PROTOCOLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "sql", "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"model": "sql", "prompt": "hi", "max_tokens": 4}),
    ("/v1/responses", {"model": "sql", "input": "hi"}),
    ("/v1/messages", {"model": "sql", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}),
    ("/generate", {"inputs": "hi", "model": "sql"}),
    ("/generate", {"inputs": "hi", "parameters": {"adapter_id": "sql"}}),
    ("/generate", {"prompt": "hi", "model": "sql"}),
]


@pytest.mark.parametrize(("path", "body"), PROTOCOLS)
async def test_every_protocol_selects_by_name(
    open_client: httpx.AsyncClient, engine: ScriptedEngine, folder: Path, path: str, body: dict[str, object]
) -> None:
    assert (await open_client.post(path, json=body)).status_code == 404
    await load(open_client, "sql", folder / "sql")
    adapter = engine.adapters.get("sql")
    answer = await open_client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert engine.requests[-1].adapter is adapter
    assert engine.requests[-1].namespace.adapter == adapter.key
    if path.startswith("/v1/"):
        assert answer.json()["model"] == "sql"
    await open_client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (await open_client.post(path, json=body)).status_code == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_streams_name_the_adapter(open_client: httpx.AsyncClient, folder: Path, path: str) -> None:
    await load(open_client, "sql", folder / "sql")
    body = dict(next(body for known, body in PROTOCOLS if known == path)) | {"stream": True}
    text = (await open_client.post(path, json=body)).text
    assert '"model":"sql"' in text
    assert '"model":"scripted"' not in text


async def test_the_ledger_names_the_adapter_that_was_asked_for(
    engine: ScriptedEngine, settings: Settings, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "usage.db"
    server = settings.server.model_copy(update={"lora_directories": (folder,), "ledger": str(file)})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await load(client, "sql", folder / "sql")
        await load(client, "queries", folder / "sql")  # the same matrices
        for model in ("sql", "queries", "queries", "scripted"):
            answer = await client.post(
                "/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 2}
            )
            assert answer.status_code == 200, answer.text
    rows = {row.model: row.num_requests for row in usage(sqlite_url(file), "model")}
    assert rows == {"sql": 1, "queries": 2, "scripted": 1}


async def test_two_names_of_one_request_must_agree(open_client: httpx.AsyncClient, folder: Path) -> None:
    await load(open_client, "sql", folder / "sql")
    await load(open_client, "poems", folder / "poems")
    body = {"inputs": "hi", "model": "poems", "parameters": {"adapter_id": "sql"}}
    answer = await open_client.post("/generate", json=body)
    assert answer.status_code == 422
    assert "different adapters" in answer.text


async def test_refusals(open_client: httpx.AsyncClient, engine: ScriptedEngine, folder: Path) -> None:
    """Nothing outside the allowed directories is read, and nothing of what is there is told."""
    outside = folder.parent / "other"
    (folder / "link").symlink_to(outside)
    for path in (outside, folder / ".." / "other", folder / "link", "/etc", "/dev/zero", "a\0b", "relative"):
        answer = await load(open_client, "x", path)
        assert answer.status_code == 400, path
    for name in ("", "scripted", " x", "x" * 300, "a\nb"):
        assert (await load(open_client, name, folder / "sql")).status_code == 400, name
    await load(open_client, "sql", folder / "sql")
    twice = await load(open_client, "sql", folder / "poems")
    assert twice.status_code == 400
    assert "already" in twice.json()["error"]["message"]
    assert len(engine.adapters.all()) == 1
    for body in ({}, {"lora_name": "x"}, {"lora_name": 1, "lora_path": 2}):
        assert (await open_client.post("/v1/load_lora_adapter", json=body)).status_code == 400


async def test_off_unless_directories_are_allowed(client: httpx.AsyncClient, folder: Path) -> None:
    for path in ("load", "unload"):
        answer = await client.post(f"/v1/{path}_lora_adapter", json={"lora_name": "x", "lora_path": "y"})
        assert answer.status_code == 404
        assert "--lora-directories" in answer.json()["error"]["message"]


async def test_the_operator_alone(engine: ScriptedEngine, settings: Settings, folder: Path) -> None:
    server = settings.server.model_copy(
        update={"lora_directories": (folder,), "admin_key": "secret", "api_key": "public"}
    )
    app = create_app(engine, settings.model_copy(update={"server": server}))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        body = {"lora_name": "sql", "lora_path": str(folder / "sql")}
        for headers in ({}, {"authorization": "Bearer public"}):
            assert (await http.post("/v1/load_lora_adapter", json=body, headers=headers)).status_code == 401
        admin = {"authorization": "Bearer secret"}
        assert (await http.post("/v1/load_lora_adapter", json=body, headers=admin)).status_code == 200


async def test_a_stored_conversation_goes_on_with_any_adapter(
    open_client: httpx.AsyncClient, engine: ScriptedEngine, folder: Path
) -> None:
    await load(open_client, "sql", folder / "sql")
    first = (await open_client.post("/v1/responses", json={"model": "sql", "input": "hi"})).json()
    body = {"model": "scripted", "input": "and?", "previous_response_id": first["id"]}
    second = await open_client.post("/v1/responses", json=body)
    assert second.json()["model"] == "scripted"
    assert engine.requests[-1].adapter is None
