"""A proxy checks who asks before it reads a body, and holds no more bodies than it may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from stemma.config.server_settings import ServerSettings
from stemma.server.door.access import Access
from stemma_router.routing.fleet import create_fleet_app
from stemma_router.routing.relay import RouteOptions
from stemma_router.routing.server_list import FleetServer

GOOD, WRONG = {"authorization": "Bearer good"}, {"authorization": "Bearer wrong"}
BODY = {"prompt": "ab"}


class Servers:
    """What the proxy asks: a server with one key."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ids: list[str] = []
        self.is_down = False
        self.wait: asyncio.Event | None = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("down")
        self.asked.append(request.url.path)
        if request.url.path == "/v1/completions":
            self.ids.append(request.headers["x-request-id"])
            if self.wait is not None:
                await self.wait.wait()
        if request.headers.get("authorization") != GOOD["authorization"]:
            return httpx.Response(401, json={"error": {"message": "wrong key", "code": "invalid_api_key"}})
        return httpx.Response(200, json={"tokens": [1, 2]})


@pytest.fixture
def servers() -> Servers:
    return Servers()


def proxy(servers: Servers, options: RouteOptions | None = None) -> httpx.AsyncClient:
    inner = httpx.AsyncClient(transport=httpx.MockTransport(servers))
    app = create_fleet_app([FleetServer("http://a"), FleetServer("http://b")], client=inner, options=options)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


class Upload:
    """A body that counts what was read of it."""

    def __init__(self) -> None:
        self.num_read = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        for _ in range(100):
            self.num_read += 1
            yield b"x" * 1000


@pytest.mark.parametrize("is_known", [False, True])
async def test_nothing_of_a_body_with_a_wrong_key_is_read(servers: Servers, is_known: bool) -> None:
    """Neither where a server is asked, nor where the proxy has the keys itself."""
    access = Access(ServerSettings(api_key="good")) if is_known else None
    client, upload = proxy(servers, RouteOptions(access=access)), Upload()
    for _ in range(20):
        answer = await client.post("/v1/completions", content=upload.chunks(), headers=WRONG)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert upload.num_read == 0
    asked = [] if is_known else ["/v1/models"] * 2  # a second server confirms a refusal
    assert servers.asked == asked, "neither tokenized nor passed on"
    assert (await client.post("/v1/completions", json=BODY, headers=GOOD)).status_code == 200


async def test_a_good_key_is_asked_for_once_also_by_many_at_once(servers: Servers) -> None:
    client = proxy(servers)
    answers = await asyncio.gather(
        *(client.post("/v1/completions", json=BODY, headers=GOOD) for _ in range(10))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert servers.asked.count("/v1/models") == 1


async def test_without_a_server_no_body_is_read(servers: Servers) -> None:
    servers.is_down = True
    client, upload = proxy(servers), Upload()
    answer = await client.post("/v1/completions", content=upload.chunks(), headers=GOOD)
    assert (answer.status_code, upload.num_read) == (503, 0)
    servers.is_down = False
    assert (await client.post("/v1/completions", json=BODY, headers=GOOD)).status_code == 200


@pytest.mark.parametrize(
    "odd", [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}]
)
@pytest.mark.parametrize("key", [{}, GOOD, {"x-api-key": "anything"}])
async def test_host_and_origin_are_checked_whatever_key_there_is(
    servers: Servers, odd: dict[str, str], key: dict[str, str]
) -> None:
    """A page that was bound to this machine's name again may send any header."""
    answer = await proxy(servers).post("/v1/completions", json=BODY, headers={**key, **odd})
    assert answer.status_code == 403
    assert servers.asked == []


async def test_bodies_under_way_are_bounded(servers: Servers) -> None:
    servers.wait = asyncio.Event()
    client = proxy(servers, RouteOptions(body_memory=10_000))
    large = {"prompt": "x" * 4000}
    running = asyncio.create_task(client.post("/v1/completions", json=large, headers=GOOD))
    while "/v1/completions" not in servers.asked:
        await asyncio.sleep(0.01)
    refused = await client.post("/v1/completions", json=large, headers=GOOD)
    assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
    servers.wait.set()
    assert (await running).status_code == 200
    assert (await client.post("/v1/completions", json=large, headers=GOOD)).status_code == 200


async def test_request_ids_are_passed_on(servers: Servers) -> None:
    client = proxy(servers)
    answer = await client.post("/v1/completions", json=BODY, headers={**GOOD, "x-request-id": "one"})
    assert answer.headers.get_list("x-request-id") == ["one"]
    answer = await client.post("/v1/completions", json=BODY, headers=GOOD)
    assert servers.ids == ["one", answer.headers["x-request-id"]]
