"""What the page of a fleet is told: servers, hits, what became of them, who was refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI
from packages.router.tests.upstream import Upstream

from stemma_router.routing import dashboard
from stemma_router.routing.fleet import create_fleet_app
from stemma_router.routing.relay import RouteOptions
from stemma_router.routing.route import create_route_app
from stemma_router.routing.server_list import ServerList

KEY = "s3cret"
OPTIONS = RouteOptions(admin_key=KEY, max_body_bytes=10_000)
BEARER = {"authorization": f"Bearer {KEY}"}
BODY = {"prompt": list(range(200))}


@pytest.fixture
def servers() -> Iterator[list[Upstream]]:
    made = [Upstream(f"s{number}") for number in range(2)]
    yield made
    for server in made:
        server.stop()


async def asked(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


async def look(proxy: httpx.AsyncClient) -> dict[str, Any]:
    answer = await proxy.get("/admin/live/now", headers=BEARER)
    assert answer.status_code == 200
    return dict(answer.json())


async def test_hits_and_ejections_are_told_by_server(servers: list[Upstream]) -> None:
    sick, well = servers
    app = create_fleet_app(ServerList([one.url for one in servers]), "round-robin", options=OPTIONS)
    async for proxy in asked(app):
        sick.status = 500
        for _ in range(8):
            assert (await proxy.post("/v1/completions", json=BODY)).status_code == 200
        [fleet] = (await look(proxy))["fleets"]
        by_url = {one["url"]: one for one in fleet["servers"]}
        assert by_url[well.url]["delivered_tokens"] == 8 * 7
        assert by_url[well.url]["prompt_tokens"] == 8 * 200
        assert by_url[well.url]["standing"] == "healthy"
        assert by_url[sick.url]["standing"] == "ejected"
        assert 0 < by_url[sick.url]["ejected_for_s"] <= 5.0
        assert by_url[sick.url]["ejections"] == {"in_a_row": 1}
        events = [(one["url"], one["what"], one["why"]) for one in fleet["events"]]
        assert events == [
            (sick.url, "joined", "it is in the list"),
            (well.url, "joined", "it is in the list"),
            (sick.url, "ejected", "3 failures in a row, the last: failed; for 5 s"),
        ]
        sums = {tuple(row[:-1]): row[-1] for row in fleet["lately"]["minute"]["sums"]}
        assert sums["delivered",] == 8 * 7
        assert sums["tries", "failed"] == 3
        assert fleet["lately"]["hour"]["times"] == {}, "these answers tell no tokens, and weren't streamed"


async def test_who_was_refused_and_why(servers: list[Upstream]) -> None:
    app = create_fleet_app(ServerList([servers[0].url]), options=OPTIONS)
    async for proxy in asked(app):
        agent = {"user-agent": "test/1"}
        await proxy.post("/v1/completions", json={"prompt": "x" * 20_000}, headers=agent)
        for status, error in ((429, {"error": {"message": "later"}}), (400, {"error": "odd"})):
            servers[0].status, servers[0].error = status, error
            await proxy.post("/v1/completions", json=BODY)
        await proxy.get("/v1/nothing/<b>")
        shown = await look(proxy)
        refusals = [(one["reason"], one["status"], one["message"]) for one in reversed(shown["refusals"])]
        assert refusals[0][:2] == ("body_too_large", 413)
        assert refusals[1:] == [
            ("rate_limited", 429, "later"),
            ("invalid_request", 400, "no server took it"),
            ("not_found", 404, "no server took it"),
        ]
        assert shown["refusals"][-1]["client"] == "test/1"
        assert {one["route"] for one in shown["refusals"]} == {"/v1/completions", "others"}
        assert sum(row[-1] for row in shown["lately"]["minute"]["sums"] if row[0] == "refused") == 4


async def test_prefill_and_decode_are_two_fleets(servers: list[Upstream]) -> None:
    app = create_route_app([servers[0].url], [servers[1].url], options=OPTIONS)
    async for proxy in asked(app):
        assert (await proxy.post("/v1/completions", json=BODY)).status_code == 200
        fleets = (await look(proxy))["fleets"]
        assert [(one["role"], one["servers"][0]["url"]) for one in fleets] == [
            ("prefill", servers[0].url),
            ("decode", servers[1].url),
        ]


async def test_the_page_is_open_and_its_figures_are_not(
    servers: list[Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "MAX_STREAMS", 0)
    app = create_fleet_app(ServerList([servers[0].url]), options=OPTIONS)
    async for proxy in asked(app):
        page = await proxy.get("/dashboard")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for name in ("fleet.js", "style.css", "watch.js", "elements.js", "glance.js", "http.js"):
            assert (await proxy.get(f"/dashboard/{name}")).status_code == 200
        assert (await proxy.get("/dashboard/app.js")).status_code == 404
        for path in ("/admin/live", "/admin/live/now"):
            assert (await proxy.get(path)).status_code == 401
        assert (await proxy.get("/admin/live", headers=BEARER)).status_code == 503


async def test_a_look_is_json_whatever_happened(servers: list[Upstream]) -> None:
    app = create_fleet_app(ServerList([servers[0].url, "http://127.0.0.1:9"]), options=OPTIONS)
    async for proxy in asked(app):
        for _ in range(4):
            await proxy.post("/v1/completions", json={**BODY, "stream": True})
        shown = await look(proxy)
        assert orjson.loads(orjson.dumps(shown)) == shown
        times = shown["fleets"][0]["lately"]["minute"]["times"]
        assert times["first_byte"]["count"] == 4
        assert 0 < times["first_byte"]["p50"] <= times["first_byte"]["p95"]
