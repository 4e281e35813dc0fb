"""What a router counts: hits of every plane, times to first bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.scripted_engine import ScriptedEngine

from stemma.config.settings import Settings
from stemma.server.app import create_app
from stemma_router.routing.fleet import create_fleet_app
from stemma_router.routing.relay import RouteOptions
from stemma_router.routing.server_list import FleetServer

URL = "http://localhost:7001"
ADMIN = {"authorization": "Bearer s3cret"}
OPTIONS = RouteOptions(admin_key="s3cret")
SAID = [{"role": "user", "content": "What was cached before?"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "What was cached before?"},
    "/v1/chat/completions": {"messages": SAID},
    "/v1/messages": {"messages": SAID, "max_tokens": 4},
    "/v1/responses": {"input": SAID, "max_output_tokens": 16},
}


@pytest.fixture
async def proxy(engine: ScriptedEngine, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A router in front of one server, both in this process."""
    behind = httpx.AsyncClient(transport=httpx.ASGITransport(app=create_app(engine, settings)))
    app = create_fleet_app([FleetServer(URL)], client=behind, options=OPTIONS)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=ADMIN) as client,
    ):
        yield client


async def value(proxy: httpx.AsyncClient, name: str) -> float:
    text = (await proxy.get("/metrics")).text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return sum(one.value for one in samples if one.name == name)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_hits_of_every_plane_are_counted(proxy: httpx.AsyncClient, path: str, streams: bool) -> None:
    body = {"model": "scripted", "stream": streams, **REQUESTS[path]}
    for _ in range(2):
        assert (await proxy.post(path, json=body)).status_code == 200
    assert await value(proxy, "stemma_route_told_hit_tokens_total") > 5
    assert await value(proxy, "stemma_route_time_to_first_byte_seconds_count") == 2 * streams
