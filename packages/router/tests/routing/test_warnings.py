"""What an operator should know of servers stands in the router's state, and in its log, once."""

from __future__ import annotations

import asyncio

import httpx
import orjson
import pytest

from stemma.told import Told, ToldModel
from stemma_router.routing import served_fleet
from stemma_router.routing.served_fleet import ServedFleet
from stemma_router.routing.server_list import FleetServer, ServerList

pytest.importorskip("zmq", reason="the extra `events` isn't installed")


async def test_another_model_and_a_wrong_events_address_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_fleet, "WATCH_EVERY_S", 0.02)

    def health(request: httpx.Request) -> httpx.Response:
        model = "other" if request.url.port == 7002 else "one"
        told = Told(serves=ToldModel(block_size=16, model=model, kv="k"))
        return httpx.Response(200, content=orjson.dumps(told.as_json()))

    client = httpx.AsyncClient(transport=httpx.MockTransport(health))
    servers = [FleetServer(f"http://127.0.0.1:{port}") for port in (7001, 7002, 7003)]
    servers[2] = FleetServer(servers[2].url, events="tcp://127.0.0.1:1")
    served = ServedFleet(ServerList(servers), "cache-aware", client)
    wanted = ["http://127.0.0.1:7002: other weights", "http://127.0.0.1:7003: its KV events can't be had"]
    async with served.serving(), asyncio.timeout(20):
        while not all(one in caplog.text for one in wanted):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert [caplog.text.count(one) for one in wanted] == [1, 1]
        state = served.describe()
        assert len(state["warnings"]) == 2
        assert state["events"]["http://127.0.0.1:7003"]["state"] == "unreachable"
        assert state["known_blocks"] == {server.url: 0 for server in servers}
        assert any(family.name == "stemma_route_events_followed" for family in served.metrics())
