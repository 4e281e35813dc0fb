"""Images by URL: only from public addresses, those that were checked, within time and size."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from stemma.config.settings import ImageSettings
from stemma.errors import InvalidRequest, TookTooLong
from stemma.server.turn.fetching import Address, ImageFetcher, is_public, resolve
from tests.server.threaded import served_in_thread

LOOPBACK = ipaddress.ip_address("127.0.0.1")
SETTINGS = ImageSettings(urls=True, max_bytes=1000, url_timeout_s=2.0)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/a.png", "http://localhost/a.png", "http://[::1]/a.png", "http://0/a.png"),
        *("http://2130706433/a.png", "http://0x7f000001/a.png", "http://127.1/a.png"),
        *("http://[::ffff:127.0.0.1]/a.png", "http://169.254.169.254/latest/meta-data"),
    ],
)
async def test_this_machine_is_never_asked(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"image 1 (.* isn't public|can't be fetched)"):
        await ImageFetcher(SETTINGS).fetch(url, "image 1")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "ftp://example.com/a.png",
            "file:///etc/passwd",
            "http:///a.png",
            "a.png",
            "http://u:p@example.com/",
        ),
        *("http://exa mple/", "http://[::1", "http://example.com:99999/", "gopher://x", "//example.com/a"),
        "http://" + "a" * 10_000,
    ],
)
async def test_urls_that_are_not_taken(url: str) -> None:
    with pytest.raises(InvalidRequest, match="image 1"):
        await ImageFetcher(SETTINGS).fetch(url, "image 1")


class Site:
    """A server whose answers the tests choose, and the names that lead to it."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        """Of the requests that came."""
        self.app = Starlette(routes=[Route("/{name:path}", self._answer)])
        self.port = 0

    async def _answer(self, request: Request) -> Response:
        self.hosts.append(request.headers["host"])
        name = request.path_params["name"]
        if name == "large":
            return Response(b"x" * 1001)
        if name == "endless":
            return StreamingResponse(self._endless())
        if name == "squeezed":
            return Response(b"x", headers={"content-encoding": "gzip"})
        if name == "loop":
            return RedirectResponse("/loop")
        if name.startswith("to/"):
            return RedirectResponse(request.query_params["where"])
        if name == "missing":
            return Response(status_code=404)
        return Response(b"a file")

    async def _endless(self) -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x"
            await asyncio.sleep(0.1)


@pytest.fixture
def site() -> Iterator[Site]:
    one = Site()
    with served_in_thread(one.app) as port:
        one.port = port
        yield one


def fetcher(resolved: dict[str, list[str]], may: Callable[[Address], bool] | None = None) -> ImageFetcher:
    async def resolver(host: str, port: int) -> list[Address]:
        if host not in resolved:
            return await resolve(host, port)
        return [ipaddress.ip_address(one) for one in resolved[host]]

    return ImageFetcher(SETTINGS, resolver=resolver, may_connect=may or (lambda one: one == LOOPBACK))


async def test_a_file_comes_from_the_address_that_was_checked(site: Site) -> None:
    one = fetcher({"pictures.test": ["127.0.0.1"]})
    assert await one.fetch(f"http://pictures.test:{site.port}/a.png", "image 1") == b"a file"
    assert site.hosts == [f"pictures.test:{site.port}"]


async def test_every_address_of_a_name_must_be_public(site: Site) -> None:
    one = fetcher({"mixed.test": ["127.0.0.1", "10.0.0.1"], "nobody.test": []})
    for host in ("mixed.test", "nobody.test"):
        with pytest.raises(InvalidRequest, match="isn't public"):
            await one.fetch(f"http://{host}:{site.port}/a.png", "image 1")
    assert not site.hosts


async def test_a_redirect_is_checked_anew(site: Site) -> None:
    base = f"http://pictures.test:{site.port}"
    one = fetcher({"pictures.test": ["127.0.0.1"], "inner.test": ["10.0.0.1"]})
    assert await one.fetch(f"{base}/to/?where=/a.png", "image 1") == b"a file"
    for where in ("http://inner.test/secret", "file:///etc/passwd", "http://10.0.0.1/"):
        with pytest.raises(InvalidRequest, match=r"isn't public|needs a data:"):
            await one.fetch(f"{base}/to/?where={where}", "image 1")
    with pytest.raises(InvalidRequest, match="redirected more than 3 times"):
        await one.fetch(f"{base}/loop", "image 1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("large", "more than 1000 bytes"),
        ("squeezed", "an encoding that wasn't asked for"),
        ("missing", "its server answers 404"),
    ],
)
async def test_files_that_are_not_taken(site: Site, name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await fetcher({}).fetch(f"http://127.0.0.1:{site.port}/{name}", "image 1")


async def test_a_slow_server_takes_no_more_than_the_limit(site: Site) -> None:
    with pytest.raises(TookTooLong, match="image 1: fetching it took more than 2 s"):
        await fetcher({}).fetch(f"http://127.0.0.1:{site.port}/endless", "image 1")
