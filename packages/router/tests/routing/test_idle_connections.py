"""An idle connection is given up by whoever sends first: what is sent while it is being closed is lost."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from packages.router.tests.routing.processes import router, sick_server

from stemma_router.routing.relay import relay_client

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


async def test_the_proxy_uses_no_connection_that_its_server_may_be_closing() -> None:
    """Servers on uvicorn close idle connections after 5 s."""
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(ANSWER)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with relay_client() as client:
        for _ in range(2):
            assert (await client.get(url)).status_code == 200
        assert num_connections == 1
        await asyncio.sleep(3.0)
        assert (await client.get(url)).status_code == 200
    assert num_connections == 2
    server.close()


@pytest.mark.slow
async def test_the_proxy_keeps_connections_longer_than_its_clients_do() -> None:
    """httpx, and with it OpenAI's client, uses one again for up to 5 s."""
    behind = sick_server()
    proxy = router(behind.url)
    try:
        url = httpx.URL(proxy.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        for pause_s in (6.0, 0.0):
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in await reader.readline()
            while await reader.readline() != b"\r\n":
                pass
            await reader.read(65536)
            await asyncio.sleep(pause_s)
        writer.close()
    finally:
        proxy.stop()
        behind.stop()
