"""Every route says who may see it, and answers nobody else: with no key, two tenants' and the operator's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import Response

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import EngineSettings, ModelSettings, Settings
from stemma.server.app import all_routers, create_app
from stemma.server.door.keyfile import add_key
from stemma.server.errors import openai_error
from stemma.server.routes import PUBLIC, Audience, AudienceRoute, Router
from tests.server.scripted_engine import ScriptedEngine

REFUSED = (401, 403)
PATHS = {"{model}": "scripted", "{name:path}": "scripted", "{name}": "style.css", "{suffix}": "-1"}


def routes() -> Iterator[tuple[str, str, Audience]]:
    """Yield method, path and audience of every route."""
    for router in all_routers():
        for route in router.routes:
            assert isinstance(route, AudienceRoute), route
            path = route.path
            for name, value in PATHS.items():
                path = path.replace(name, value)
            for method in route.methods or ():
                yield method, path, route.audience


class Rig:
    def __init__(self, engine: ScriptedEngine, folder: Path) -> None:
        keys = folder / "keys.toml"
        self.headers = {name: bearer(add_key(keys, name)) for name in ("ada", "bob")}
        self.headers |= {"nobody": {}, "operator": bearer("root")}
        self.app: FastAPI = create_app(
            engine,
            Settings(
                engine=EngineSettings(model=ModelSettings(path=Path("scripted"))),
                server=ServerSettings(api_keys_file=keys, admin_key="root", trust_imports=True),
            ),
        )
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def ask(self, who: str, method: str, path: str, body: object = None) -> httpx.Response:
        return await self.client.request(
            method, path, headers=self.headers[who], json={} if body is None and method == "POST" else body
        )


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def rig(engine: ScriptedEngine, tmp_path: Path) -> Rig:
    return Rig(engine, tmp_path)


async def test_every_answer_holds_to_the_declaration(rig: Rig) -> None:
    rig.app.state.lifecycle.draining = True  # streams of the operator's end at once
    allowed = {
        Audience.PUBLIC: {"nobody", "ada", "bob", "operator"},
        Audience.TENANT: {"ada", "bob"},
        Audience.SUMS: {"operator"},
        Audience.OPERATOR: {"operator"},
    }
    seen = set()
    for method, path, audience in routes():
        for who in rig.headers:
            answer = await rig.ask(who, method, path)
            is_let_in = answer.status_code not in REFUSED
            assert is_let_in == (who in allowed[audience]), (method, path, audience, who, answer.text[:200])
        seen.add((method.lower(), path))
    document = (await rig.client.get("/openapi.json")).json()
    made = {route.path_format for router in all_routers() for route in router.routes}  # type: ignore[attr-defined]
    assert set(document["paths"]) <= made
    assert len(seen) >= len(document["paths"])


def test_a_route_without_an_audience_cannot_be_made() -> None:
    router = Router(openai_error)
    with pytest.raises(TypeError, match="audience"):
        router.get("/new")  # type: ignore[call-arg]

    async def handler() -> Response:
        return Response()

    assert router.get("/new", PUBLIC)(handler) is handler
    [route] = router.routes
    assert isinstance(route, AudienceRoute)
    assert route.audience is PUBLIC


async def test_status_is_no_oracle_between_tenants(rig: Rig) -> None:
    """Free blocks and running requests tell a hit from a miss, and a prompt's length."""
    for who in ("ada", "bob", "nobody"):
        assert (await rig.ask(who, "GET", "/metrics")).status_code == 401
    assert (await rig.ask("operator", "GET", "/metrics")).status_code == 200


async def test_head_answers_where_get_does(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/health", "/metrics", "/openapi.json", "/admin/live"):
        async with asyncio.timeout(5):
            assert (await client.head(path)).status_code == 200
    assert (await client.head("/v1/completions")).status_code == 405


async def test_request_ids_are_taken_or_made_and_returned(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    mine = {"x-request-id": "trace-7/a"}
    body = {"prompt": "ab", "max_tokens": 2}
    for stream in (False, True):
        answer = await client.post("/v1/completions", json={**body, "stream": stream}, headers=mine)
        assert answer.headers.get_list("x-request-id") == ["trace-7/a"]
    found = (await client.get("/admin/explain", params={"request": "trace-7/a"})).json()
    assert found["x_request_id"] == "trace-7/a"
    assert found["request"] == engine.requests[-1].request_id
    made = set()
    for odd in ("x" * 129, "a b", "é", "", None):
        headers = [] if odd is None else [(b"x-request-id", odd.encode())]
        made.add((await client.get("/health", headers=headers)).headers["x-request-id"])
    assert len(made) == 5
    assert all(one.startswith("req_") for one in made)
    refused = await client.post("/v1/messages", json={}, headers=mine)
    assert (refused.status_code, refused.headers["request-id"]) == (400, "trace-7/a")
    for path in ("/nowhere", "/v1/models/none"):
        assert (await client.get(path, headers=mine)).headers["x-request-id"] == "trace-7/a"
