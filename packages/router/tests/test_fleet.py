"""The proxy in front of equal servers: where requests go, and what happens when servers fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import numpy as np
import pytest
from packages.router.tests.upstream import Upstream

from stemma.errors import ConfigError
from stemma.types import TokenArray
from stemma_router.routing.fleet import create_fleet_app
from stemma_router.routing.relay import RouteOptions
from stemma_router.routing.server_list import FleetServer

TOKENS = list(range(200))


@pytest.fixture
def servers() -> Iterator[list[Upstream]]:
    made = [Upstream(f"s{number}") for number in range(3)]
    yield made
    for server in made:
        server.stop()


async def proxy_of(servers: list[FleetServer], **fields) -> AsyncIterator[httpx.AsyncClient]:
    app = create_fleet_app(
        servers, options=RouteOptions(max_body_bytes=100_000, admin_key="s3cret"), **fields
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    headers = {"authorization": "Bearer s3cret"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client,
    ):
        yield client


@pytest.fixture
async def proxy(servers: list[Upstream]) -> AsyncIterator[httpx.AsyncClient]:
    async for client in proxy_of([FleetServer(server.url) for server in servers]):
        yield client


async def served_by(proxy: httpx.AsyncClient, prompt: object, **fields) -> str:
    answer = await proxy.post("/v1/completions", json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["served_by"]


async def loads(proxy: httpx.AsyncClient) -> list[int]:
    health = (await proxy.get("/health")).json()
    return [load["requests"] for load in health["loads"].values()]


async def test_prompts_that_begin_alike_go_to_one_server_and_others_spread(proxy: httpx.AsyncClient) -> None:
    first = await served_by(proxy, TOKENS)
    assert {await served_by(proxy, TOKENS[: 150 + n]) for n in range(5)} == {first}
    others = {await served_by(proxy, [1000 * n, *TOKENS]) for n in range(1, 30)}
    assert others == {"s0", "s1", "s2"}
    assert await loads(proxy) == [0, 0, 0]


async def test_a_server_that_is_down_is_replaced(servers: list[Upstream], proxy: httpx.AsyncClient) -> None:
    first = await served_by(proxy, TOKENS)
    chosen = next(server for server in servers if server.name == first)
    chosen.stop()
    second = await served_by(proxy, TOKENS)
    assert second != first
    health = (await proxy.get("/health")).json()
    assert (health["num_retries"], set(health["servers"])) == (1, {server.url for server in servers})
    async with asyncio.timeout(10):
        while sorted((await proxy.get("/health")).json()["servers"].values()) != ["down", *["healthy"] * 2]:
            await asyncio.sleep(0.05)
    for server in servers:
        server.stop()
    assert (await proxy.post("/v1/completions", json={"prompt": TOKENS})).status_code == 503


async def test_a_server_that_cannot_be_reached_is_asked_last_for_a_while(
    servers: list[Upstream], proxy: httpx.AsyncClient
) -> None:
    first = await served_by(proxy, TOKENS)
    next(server for server in servers if server.name == first).stop()
    assert first not in {await served_by(proxy, TOKENS) for _ in range(5)}
    assert (await proxy.get("/health")).json()["num_retries"] == 1


async def test_who_drains_is_passed_over_and_a_bad_request_is_not_repeated(
    servers: list[Upstream], proxy: httpx.AsyncClient
) -> None:
    first = await served_by(proxy, TOKENS)
    chosen = next(server for server in servers if server.name == first)
    chosen.status = 503
    assert await served_by(proxy, TOKENS) != first
    for server in servers:
        server.status = 400
        server.bodies.clear()
    assert (await proxy.post("/v1/completions", json={"prompt": TOKENS})).status_code == 400
    assert sum(len(server.bodies) for server in servers) == 1
    for server in servers:
        server.status = 503
    assert (await proxy.post("/v1/completions", json={"prompt": TOKENS})).status_code == 503
    assert await loads(proxy) == [0, 0, 0]


@pytest.mark.parametrize("break_after", [0, 2])
async def test_a_stream_is_sent_once(
    servers: list[Upstream], proxy: httpx.AsyncClient, break_after: int
) -> None:
    """Before the first byte another server answers; afterwards the client is told that it is incomplete."""
    first = await served_by(proxy, TOKENS)
    chosen = next(server for server in servers if server.name == first)
    chosen.break_after = break_after
    answer = await proxy.post("/v1/completions", json={"prompt": TOKENS, "stream": True})
    events = [line for line in answer.text.split("\n") if line.startswith("data:")]
    if break_after == 0:
        assert len(events) == 3
        assert f"{first} 0" not in answer.text
    else:
        assert [event for event in events if first in event] == [f"data: {first} 0", f"data: {first} 1"]
        assert "stream_broken" in events[-1]
        assert sum(len(server.bodies) for server in servers) == 2
    assert await loads(proxy) == [0, 0, 0]


async def test_a_client_that_leaves_frees_the_server(
    servers: list[Upstream], proxy: httpx.AsyncClient
) -> None:
    for server in servers:
        server.hangs = True
    task = asyncio.create_task(proxy.post("/v1/completions", json={"prompt": TOKENS}))
    async with asyncio.timeout(10):
        while sum(await loads(proxy)) == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while sum(await loads(proxy)):
            await asyncio.sleep(0.01)


async def test_events_tell_where_a_prefix_is() -> None:
    pytest.importorskip("zmq", reason="the extra `events` isn't installed")
    from stemma.memory.kv_events import BlocksStored
    from stemma.prefix.keys import DEFAULT_NAMESPACE
    from stemma.supervision import LoggingSupervisor
    from stemma.types import BlockKey
    from stemma_router.kv_events.publisher import KVEventPublisher

    address = "tcp://127.0.0.1:*"
    publishers = [
        KVEventPublisher(address, address, block_size=16, supervisor=LoggingSupervisor()) for _ in range(3)
    ]
    upstreams = [Upstream(f"s{number}") for number in range(3)]
    fleet = [
        FleetServer(one.url, publisher.endpoint, publisher.replay_endpoint)
        for one, publisher in zip(upstreams, publishers, strict=True)
    ]
    try:
        async for proxy in proxy_of(fleet):
            home = int((await served_by(proxy, TOKENS))[1:])
            other = (home + 1) % 3
            keys = tuple(BlockKey(bytes([n]) * 32) for n in range(12))
            tokens = np.asarray(TOKENS[:192], dtype=np.int32)
            publishers[other].put(BlocksStored(keys, None, tokens, DEFAULT_NAMESPACE))
            async with asyncio.timeout(10):
                while (await proxy.get("/health")).json()["num_known_blocks"] < 12:
                    await asyncio.sleep(0.01)
            assert await served_by(proxy, TOKENS) == f"s{other}"
    finally:
        for publisher in publishers:
            publisher.close()
        for one in upstreams:
            one.stop()


async def test_texts_are_tokenized_by_a_server_or_go_by_their_beginning(
    servers: list[Upstream], proxy: httpx.AsyncClient
) -> None:
    """These servers have no /tokenize: the text's first kilobyte decides."""
    first = await served_by(proxy, "a" * 2000)
    assert {await served_by(proxy, "a" * 2000 + "b" * n) for n in range(4)} == {first}
    messages = [{"role": "user", "content": "Hello"}]
    answer = await proxy.post("/v1/completions", json={"messages": messages})
    assert answer.status_code == 200


CONVERSATION = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": CONVERSATION, "system": "Be kind.", "max_tokens": 5}),
        ("/v1/responses", {"input": CONVERSATION, "instructions": "Be kind."}),
        ("/infer_token", {"input_id": TOKENS}),
        ("/v2/models/m/generate", {"text_input": "Hello"}),
        ("/v2/models/m/versions/1/infer", {"inputs": [{"name": "input0", "data": TOKENS}]}),
    ],
)
async def test_every_protocol_goes_by_its_prompt(
    servers: list[Upstream], proxy: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    answers = [await proxy.post(path, json=body, headers={"x-api-key": "k"}) for _ in range(4)]
    assert len({answer.json()["served_by"] for answer in answers}) == 1
    assert answers[0].headers["x-stemma-cached-tokens"] == "7"
    asked = [server for server in servers if server.bodies]
    assert [server.headers[0]["x-api-key"] for server in asked] == ["k"]
    assert await loads(proxy) == [0, 0, 0]


async def test_what_one_server_has_not_another_may_have(
    servers: list[Upstream], proxy: httpx.AsyncClient
) -> None:
    """An adapter that was loaded on one server, a conversation that one server stored."""
    servers[0].status = servers[1].status = 404
    assert await served_by(proxy, TOKENS) == "s2"
    assert (await proxy.get("/v1/responses/resp_1")).json()["served_by"] == "s2"
    for server in servers[:2]:
        server.status, server.error = 400, {"error": {"param": "previous_response_id"}}
    continued = {"input": "Go on.", "previous_response_id": "resp_1"}
    assert (await proxy.post("/v1/responses", json=continued)).json()["served_by"] == "s2"
    for server in servers:
        server.status = 404
    assert (await proxy.get("/v1/responses/resp_1")).status_code == 404
    assert await loads(proxy) == [0, 0, 0]


async def test_a_prompt_that_takes_too_long_to_tokenize_goes_by_its_beginning(
    servers: list[Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    class Slow:
        def encode(self, text: str) -> TokenArray:
            released.wait(30)
            return np.zeros(1, np.int32)

    monkeypatch.setattr("stemma_router.routing.asking.TOKENIZE_TIMEOUT_S", 0.05)
    try:
        async for proxy in proxy_of([FleetServer(server.url) for server in servers], tokenizer=Slow()):
            assert len({await served_by(proxy, "Hello") for _ in range(3)}) == 1
    finally:
        released.set()


@pytest.mark.parametrize(
    "text", ["localhost:8000", "http://a,event=tcp://x", "http://a,replay=tcp://x:1", "ftp://a"]
)
def test_a_server_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="events"):
        FleetServer.parse(text)


def test_servers_as_text() -> None:
    assert FleetServer.parse("http://a:1/") == FleetServer("http://a:1")
    text = "http://a:1,events=tcp://b:2,replay=tcp://b:3"
    assert FleetServer.parse(text) == FleetServer("http://a:1", "tcp://b:2", "tcp://b:3")
    with pytest.raises(ConfigError, match="at least one server"):
        create_fleet_app([])
    with pytest.raises(ConfigError, match="cache-aware"):
        create_fleet_app([FleetServer("http://a:1")], "nearest")


async def test_events_that_cannot_be_followed_are_logged(
    servers: list[Upstream], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("zmq", reason="the extra `events` isn't installed")
    fleet = [FleetServer(servers[0].url, "nowhere"), FleetServer(servers[1].url)]
    async for proxy in proxy_of(fleet, router="round-robin"):
        async with asyncio.timeout(10):
            while "its KV events aren't followed" not in caplog.text:
                await asyncio.sleep(0.01)
        servers[0].status = servers[1].status = 503
        assert (await proxy.post("/v1/completions", json={"prompt": TOKENS})).status_code == 503
        assert len(servers[0].bodies) == len(servers[1].bodies) == 1


async def test_images_pass_through_and_their_questions_meet(proxy: httpx.AsyncClient) -> None:
    """Which blocks an image's tokens name isn't known here."""

    async def asked(image: str, question: str) -> str:
        url = {"url": f"data:image/png;base64,{image * 500}"}
        parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": question}]
        body = {"messages": [{"role": "user", "content": parts}]}
        answer = await proxy.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["served_by"]

    homes = {image: {await asked(image, f"Question {n}") for n in range(4)} for image in "ABCDEFGH"}
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) > 1
