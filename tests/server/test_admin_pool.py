"""`/admin/pool` over a real engine: attach, use, break, detach."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import Settings
from stemma.engine.async_engine import AsyncEngine
from stemma.engine.llm import engine_settings
from stemma.server.app import create_app
from tests.checkpoints import build
from tests.memory.tiers.pool.servers import RedisServer, free_port


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    settings = engine_settings(checkpoint, block_size=16, kv_cache_memory="4MB", num_threads=1)
    engine = AsyncEngine.from_settings(settings)
    yield engine
    engine.close()


@pytest.fixture
async def client(engine: AsyncEngine, checkpoint: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    pools = {name: tmp_path / f"{name}.json" for name in ("directory", "redis")}
    server = ServerSettings(pool_configs=pools)
    app = create_app(engine, Settings(engine=engine_settings(checkpoint), server=server))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as http:
        yield http


async def complete(client: httpx.AsyncClient, prompt: str = "one two three " * 20) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    text: str = answer.json()["choices"][0]["text"]
    return text


async def test_attach_use_and_detach(client: httpx.AsyncClient, tmp_path: Path) -> None:
    config = tmp_path / "directory.json"
    config.write_text(json.dumps({"path": str(tmp_path / "pool")}))
    assert (await client.get("/admin/pool")).json() == {"attached": False}
    alone = await complete(client)

    answer = await client.post("/admin/pool", json={"name": "directory", "async_write": False})
    assert answer.status_code == 200
    assert answer.json() | {"reads": {}} == {
        "attached": True,
        "name": "directory",
        "circuit": "closed",
        "num_opened": 0,
        "last_error": None,
        "reads": {},
        "puts": {},
        "reasons": {},
        "read_bytes": 0,
        "written_bytes": 0,
    }
    assert await complete(client, "another text, longer than one block of sixteen tokens " * 5) != ""
    status = (await client.get("/admin/pool")).json()
    assert status["puts"]["stored"] > 0  # at once: writes are synchronous here
    assert await complete(client) == alone

    assert (await client.post("/admin/pool", json={"name": "redis"})).status_code == 409
    assert (await client.delete("/admin/pool")).json() == {"attached": False}
    assert (await client.get("/admin/pool")).json() == {"attached": False}
    assert (await client.delete("/admin/pool")).status_code == 404
    assert await complete(client) == alone
    assert list((tmp_path / "pool").rglob("*_0_1_*"))


async def test_a_pool_that_cannot_be_attached_changes_nothing(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    unknown = await client.post("/admin/pool", json={"name": "nosuch"})
    assert unknown.status_code == 400
    assert "it has: directory, redis" in unknown.json()["error"]["message"]
    assert (await client.post("/admin/pool", json={"nam": "redis"})).status_code == 400
    config = tmp_path / "redis.json"
    config.write_text(json.dumps({"url": f"redis://127.0.0.1:{free_port()}/0"}))
    away = await client.post("/admin/pool", json={"name": "redis"})
    assert away.status_code == 503
    assert (await client.get("/admin/pool")).json() == {"attached": False}
    assert await complete(client)


async def test_the_status_tells_when_the_pool_is_gone_and_back(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path)
    config = tmp_path / "redis.json"
    config.write_text(json.dumps({"url": server.url}))
    try:
        body = {"name": "redis", "async_write": False}
        assert (await client.post("/admin/pool", json=body)).status_code == 200
        assert await complete(client)
        server.stop()
        for number in range(4):
            assert await complete(client, f"number {number} of some prompts that nobody has seen " * 5)
        status = (await client.get("/admin/pool")).json()
        assert status["circuit"] != "closed"
        assert status["reasons"]["unreachable"] > 0
        assert status["last_error"].startswith("pool redis")
        server.start()
        while (await client.get("/admin/pool")).json()["circuit"] != "closed":
            await asyncio.sleep(0.05)
        stored = status["puts"]["stored"]
        assert await complete(client, "a last prompt that nobody has seen before the server came back " * 5)
        assert (await client.get("/admin/pool")).json()["puts"]["stored"] > stored
    finally:
        server.stop()


@pytest.mark.parametrize(
    "body",
    [
        {"name": "directory", "config": "/etc/passwd"},
        {"name": "directory", "path": "/etc"},
        {"name": "mooncake"},
        {"name": "directory", "staging": "lots"},
        {"name": "directory", "staging": {}},
        {"name": "directory", "deadline_s": 0},
        {"name": "directory", "write": "never"},
    ],
)
async def test_files_are_never_named_over_http(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    answer = await client.post("/admin/pool", json=body)
    assert answer.status_code == 400, answer.text
    assert "passwd" not in answer.text
