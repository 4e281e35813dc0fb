"""The list of published prefixes: which head a prompt has, bounds, and the file that keeps it."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import httpx
import numpy as np
import pytest

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import EngineSettings, ModelSettings, Settings
from stemma.errors import ConfigError, InvalidRequest, NotFound, StorageError
from stemma.prefix.keys import Namespace, PublicHead
from stemma.server.app import create_app
from stemma.server.door.published import MAX_PUBLISHED, PublishedPrefixes
from stemma.types import as_tokens
from tests.server.scripted_engine import ScriptedEngine

TENANT = Namespace(salt="tenant:x", owner="x")


def publish(known: PublishedPrefixes, tokens: list[int], **more: str) -> str:
    return asyncio.run(known.add(as_tokens(tokens), **more)).publish_id


def num_public(known: PublishedPrefixes, tokens: list[int], namespace: Namespace = TENANT) -> int:
    head = known.located(namespace, as_tokens(tokens)).head
    return 0 if head is None else head.num_tokens


def test_a_prompt_shares_the_whole_blocks_that_it_has_in_common() -> None:
    known = PublishedPrefixes(None, 4)
    first = publish(known, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    publish(known, [1, 2, 3, 4, 5, 6, 7, 0])
    assert num_public(known, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]) == 8
    assert num_public(known, [1, 2, 3, 4, 5, 6, 7]) == 4
    assert num_public(known, [1, 2, 3, 4]) == 4
    assert num_public(known, [1, 2, 3]) == 0
    assert num_public(known, [2, 2, 3, 4]) == 0
    assert num_public(known, [1, 2, 3, 4], Namespace(adapter="other")) == 0
    found = known.located(TENANT, as_tokens([1, 2, 3, 4, 9]))
    assert (found.salt, found.owner) == (TENANT.salt, TENANT.owner)
    assert found.head == PublicHead.of(as_tokens([1, 2, 3, 4]))
    asyncio.run(known.remove(first))
    assert num_public(known, [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    with pytest.raises(NotFound):
        asyncio.run(known.remove(first))


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    known = PublishedPrefixes(None, 4)
    with pytest.raises(InvalidRequest, match="whole blocks"):
        publish(known, [1, 2, 3])
    ids = {publish(known, [1, 2, 3, 4]) for _ in range(3)}
    assert len(ids) == 1
    monkeypatch.setattr("stemma.server.door.published.MAX_PUBLISHED_TOKENS", 8)
    publish(known, [5, 6, 7, 8])
    with pytest.raises(InvalidRequest, match="at most"):
        publish(known, [9, 6, 7, 8])
    assert len(known.prefixes) == 2 < MAX_PUBLISHED


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "public.json"
    known = PublishedPrefixes(path, 4)
    gone = publish(known, [9, 9, 9, 9])
    publish(known, [1, 2, 3, 4], name="system")
    asyncio.run(known.remove(gone))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    [kept] = PublishedPrefixes(path, 4).prefixes
    assert (kept.name, kept.tokens.tolist()) == ("system", [1, 2, 3, 4])
    for damaged in ("{", '{"version": 2, "prefixes": []}', "[]", '{"version": 1, "prefixes": [{}]}'):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match="published prefixes"):
            PublishedPrefixes(path, 4)
    entry = {"publish_id": "x", "token_ids": [-1], "created_at": 0.0}
    path.write_text(json.dumps({"version": 1, "prefixes": [entry]}))
    with pytest.raises(ConfigError, match="negative"):
        PublishedPrefixes(path, 4)


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    known = PublishedPrefixes(tmp_path / "missing" / "public.json", 4)
    with pytest.raises(StorageError):
        publish(known, [1, 2, 3, 4])
    assert known.prefixes == ()


async def test_over_http(engine: ScriptedEngine, tmp_path: Path) -> None:
    settings = Settings(
        engine=EngineSettings(model=ModelSettings(path=Path("scripted"))),
        server=ServerSettings(admin_key="root", public_prefixes=tmp_path / "public.json"),
    )
    transport = httpx.ASGITransport(app=create_app(engine, settings), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        body = {"prompt": list(range(1, 65)), "name": "system"}
        assert (await http.post("/admin/cache/publish", json=body)).status_code == 401
        http.headers["authorization"] = "Bearer root"
        made = (await http.post("/admin/cache/publish", json=body)).json()
        size = settings.engine.cache.block_size
        assert made["num_public_tokens"] == 64 // size * size
        assert made["is_kept"] is True
        assert engine.requests[-1].namespace == Namespace(is_public=True)
        assert np.array_equal(engine.requests[-1].prompt_token_ids, np.arange(1, 65)[: 64 // size * size])
        listed = (await http.get("/admin/cache/published")).json()["published"]
        assert [one["publish_id"] for one in listed] == [made["publish_id"]]
        prompt = {"prompt": [*range(1, 65), 3], "max_tokens": 1, "cache_salt": "a"}
        assert (await http.post("/v1/completions", json=prompt)).status_code == 200
        assert engine.requests[-1].namespace.head is not None
        gone = {"publish_id": made["publish_id"]}
        assert (await http.post("/admin/cache/unpublish", json=gone)).status_code == 200
        assert (await http.post("/admin/cache/unpublish", json=gone)).status_code == 404
        await http.post("/v1/completions", json=prompt)
        assert engine.requests[-1].namespace.head is None
        both = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
        assert (await http.post("/admin/cache/publish", json=both)).status_code == 400
