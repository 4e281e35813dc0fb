"""What an operator sees of a router, and changes while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from packages.router.tests.routing.processes import KEY, Process, health, router, sick_server
from packages.router.tests.upstream import Upstream
from prometheus_client.parser import text_string_to_metric_families

from stemma.errors import ConfigError
from stemma_router.routing import served_fleet
from stemma_router.routing.fleet import create_fleet_app
from stemma_router.routing.relay import RouteOptions
from stemma_router.routing.server_list import FleetServer, ServerList

BODY = {"prompt": list(range(200))}


@pytest.fixture
def servers() -> Iterator[list[Upstream]]:
    made = [Upstream(f"s{number}") for number in range(2)]
    yield made
    for server in made:
        server.stop()


async def proxy_of(
    source: ServerList, options: RouteOptions, router: str = "cache-aware"
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_fleet_app(source, router, options=options)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


async def shown(proxy: httpx.AsyncClient) -> set[str]:
    bearer = {"authorization": f"Bearer {KEY}"}
    return set((await proxy.get("/health", headers=bearer)).json()["servers"])


def values_of(text: str) -> dict[tuple[str, ...], float]:
    """Return the values above 0 by name and labels, those of all servers together."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = (value for name, value in sorted(sample.labels.items()) if name != "server")
            key = (sample.name, *labels)
            if sample.value:
                found[key] = found.get(key, 0.0) + sample.value
    return found


async def test_metrics_tell_what_the_router_did(servers: list[Upstream]) -> None:
    source = ServerList([server.url for server in servers])
    bearer = {"authorization": f"Bearer {KEY}"}
    async for proxy in proxy_of(source, RouteOptions(admin_key=KEY, max_body_bytes=10_000)):
        for _ in range(3):
            assert (await proxy.post("/v1/completions", json=BODY)).status_code == 200
        assert (await proxy.post("/v1/completions", json={"prompt": "x" * 20_000})).status_code == 413
        answered = next(server for server in servers if server.bodies)
        answered.status = 500
        assert (await proxy.post("/v1/completions", json=BODY)).status_code == 200
        for odd in ({}, {"authorization": "Bearer wrong"}):
            assert (await proxy.get("/metrics", headers=odd)).status_code == 401
        told = values_of((await proxy.get("/metrics", headers=bearer)).text)
        assert told[("stemma_route_requests_total",)] == 4
        assert told[("stemma_route_refused_total",)] == 1
        assert told[("stemma_route_told_hit_tokens_total", "equal")] == 4 * 7  # of answers alone
        assert told[("stemma_route_tries_total", "answered", "equal")] == 4
        assert told[("stemma_route_tries_total", "failed", "equal")] == 1
        assert told[("stemma_route_retries_total", "equal")] == 1
        assert told[("stemma_route_index_bytes",)] > 0


async def test_metrics_without_a_key_are_for_this_machine(servers: list[Upstream]) -> None:
    source = ServerList([servers[0].url])
    async for proxy in proxy_of(source, RouteOptions()):
        assert (await proxy.get("/metrics")).status_code == 200
        assert (await proxy.get("/metrics", headers={"origin": "http://evil.example"})).status_code == 403
        assert (await proxy.get("/metrics", headers={"host": "evil.example"})).status_code == 403
    async for proxy in proxy_of(source, RouteOptions(host="0.0.0.0")):
        assert (await proxy.get("/metrics", headers={"x-forwarded-for": "1.2.3.4"})).status_code == 403


async def test_servers_come_and_go_with_their_file(
    servers: list[Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_fleet, "WATCH_EVERY_S", 0.02)
    path = tmp_path / "servers"
    path.write_text(f"# one\n{servers[0].url}\n\n")
    async for proxy in proxy_of(ServerList(path=path), RouteOptions(admin_key=KEY)):
        assert await shown(proxy) == {servers[0].url}
        path.write_text(f"{servers[1].url}  # the other\n")
        async with asyncio.timeout(10):
            while await shown(proxy) != {servers[1].url}:
                await asyncio.sleep(0.01)
        assert (await proxy.post("/v1/completions", json=BODY)).json()["served_by"] == "s1"
        for wrong in ("", "# nobody\n", "ftp://x\n"):
            path.write_text(wrong)
            await asyncio.sleep(0.1)
            assert await shown(proxy) == {servers[1].url}
        path.unlink()
        await asyncio.sleep(0.1)
        assert (await proxy.post("/v1/completions", json=BODY)).json()["served_by"] == "s1"


async def test_each_address_of_a_name_is_a_server() -> None:
    addresses: list[str] | None = ["127.0.0.1", "::1"]

    async def resolve(name: str) -> list[str]:
        assert name == "stemma.example"
        if addresses is None:
            raise OSError("no such name")
        return addresses

    text = "dns+http://stemma.example:8000,events=tcp://stemma.example:5557,replay=tcp://stemma.example:5558"
    source = ServerList([text, "http://other:1"], resolve=resolve)
    expected = [
        FleetServer("http://127.0.0.1:8000", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        FleetServer("http://[::1]:8000", "tcp://[::1]:5557", "tcp://[::1]:5558"),
        FleetServer("http://other:1"),
    ]
    assert await source.current() == expected
    addresses = None
    assert await source.current() == expected, "who can't be asked has what was known"
    addresses = ["127.0.0.1"]
    assert len(await source.current()) == 2


async def test_real_names_are_resolved() -> None:
    [one, *_] = await ServerList(["dns+http://localhost:8000"]).current()
    assert one.url in ("http://127.0.0.1:8000", "http://[::1]:8000")


@pytest.mark.parametrize(
    "text", ["dns+https://a:1", "http://", "http://a:0", "http://a:99999999", "http://[a"]
)
def test_odd_servers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        ServerList([text])


def test_a_list_must_name_somebody(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        ServerList()
    with pytest.raises(ConfigError, match="can't be read"):
        ServerList(path=tmp_path / "missing")


@pytest.mark.slow
def test_a_signal_reads_the_file_at_once(tmp_path: Path) -> None:
    servers: list[Process] = [sick_server() for _ in range(2)]
    path = tmp_path / "servers"
    path.write_text(servers[0].url)
    proxy = router(flags=("--servers", str(path)))
    try:
        assert set(health(proxy)["servers"]) == {servers[0].url}  # type: ignore[call-overload]
        path.write_text("\n".join(one.url for one in servers))
        os.kill(proxy.pid, signal.SIGHUP)
        for _ in range(100):
            if len(health(proxy)["servers"]) == 2:  # type: ignore[arg-type]
                break
        else:
            raise AssertionError("the signal changed nothing")
    finally:
        for one in (proxy, *servers):
            one.stop()
