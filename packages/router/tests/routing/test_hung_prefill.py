"""Prefill servers that hang, in real processes: the decode server computes, and soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from packages.router.tests.routing.processes import KEY, Process, become, sick_server

from stemma_router.routing.relay import RouteOptions
from stemma_router.routing.route import create_route_app

LONGEST_S = 2.0
"""For twice the expected time, at least a second, and a machine that does other things."""


@pytest.fixture
def servers() -> Iterator[tuple[Process, Process]]:
    """One that computes prompts, one that answers."""
    made = sick_server(), sick_server()
    yield made
    for one in made:
        one.stop()


@pytest.fixture
async def client(servers: tuple[Process, Process]) -> AsyncIterator[httpx.AsyncClient]:
    prefill, decode = servers
    app = create_route_app([prefill.url], [decode.url], options=RouteOptions(admin_key=KEY))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client,
    ):
        yield client


async def seconds(client: httpx.AsyncClient, number: int) -> float:
    """Return how long a request took."""
    begun = time.monotonic()
    answer = await client.post("/v1/completions", json={"prompt": f"{number} of them"})
    assert answer.status_code == 200
    return time.monotonic() - begun


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["stopped", "hangs"])
async def test_a_hung_prefill_server_costs_twice_the_expected_time(
    servers: tuple[Process, Process],
    client: httpx.AsyncClient,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped: its sockets stay open, nobody reads. Hangs: its checks are answered, its requests never."""
    monkeypatch.setattr("stemma_router.cluster.detour.LEAST_S", 1e9)  # it doesn't pay before this server
    prefill, decode = servers
    for number in range(12):  # measured
        await seconds(client, number)
    if how == "stopped":
        os.kill(prefill.pid, signal.SIGSTOP)
    else:
        become(prefill, "hang")
    took = [await seconds(client, 100 + number) for number in range(6)]
    assert max(took) < LONGEST_S
    assert sum(one > 0.5 for one in took) <= 4, "it is left alone soon"
    assert become(decode, "well") == 18
    health = (await client.get("/health", headers={"authorization": f"Bearer {KEY}"})).json()
    assert 1 <= health["num_prefill_failures"] <= 4


async def test_an_address_without_a_server_costs_no_time(
    servers: tuple[Process, Process], client: httpx.AsyncClient
) -> None:
    servers[0].stop()
    assert max([await seconds(client, number) for number in range(4)]) < 0.5


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", ["502", "503", "draining"])
async def test_a_decode_server_that_drains_costs_no_request(mode: str) -> None:
    """502 is what a gateway before it says."""
    made = [sick_server() for _ in range(3)]
    try:
        become(made[1], mode)
        app = create_route_app([made[0].url], [made[1].url, made[2].url])
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client,
        ):
            for number in range(30):
                await seconds(client, number)
        assert become(made[2], "well") == 30
    finally:
        for one in made:
            one.stop()
