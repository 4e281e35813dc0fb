"""Which models are loaded: one by one, at most so many, the least valuable goes, and all are answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import Any, ClassVar

import orjson
import pytest
from fastapi import FastAPI
from packages.router.tests.upstream import Upstream

from stemma.config.loading import load_settings
from stemma.config.server_settings import ServerSettings
from stemma.errors import ConfigError, EngineFailed, StemmaError, UnknownModel
from stemma.server.door.access import Access
from stemma_router.models.command import check_shareable, child_flags, named_models
from stemma_router.models.front import make_front
from stemma_router.models.loaded import Models, State
from stemma_router.routing.relay import Relay, RouteOptions, relay_client


class FakeServer:
    """Starts when it is let."""

    running: ClassVar[set[str]] = set()

    def __init__(self, name: str, gate: threading.Event, most: list[int]) -> None:
        self.url, self._name, self._gate, self._most = "", name, gate, most
        self.fails = name.startswith("broken")

    def start(self) -> None:
        assert self._gate.wait(10)
        if self.fails:
            raise StemmaError("no such file")
        self.running.add(self._name)
        self._most[0] = max(self._most[0], len(self.running))
        self.url = f"http://{self._name}"

    def stop(self) -> int:
        self.running.discard(self._name)
        return 0

    kill = stop

    def is_running(self) -> bool:
        return self._name in self.running


def models(*names: str, max_loaded: int = 1, idle_s: float | None = None) -> tuple[Models, list[int]]:
    gate, most = threading.Event(), [0]
    gate.set()
    FakeServer.running = set()
    makers = {name: partial(FakeServer, name, gate, most) for name in names}
    return Models(makers, max_loaded=max_loaded, idle_s=idle_s), most


async def use(held: Models, name: str) -> str:
    model = held.find(name)
    url = await held.acquire(model)
    await asyncio.sleep(0)
    assert name in FakeServer.running
    held.release(model)
    return url


@pytest.mark.parametrize("max_loaded", [1, 2])
async def test_all_are_answered_though_few_are_loaded(max_loaded: int) -> None:
    held, most = models("a", "b", "c", max_loaded=max_loaded)
    order = "abcacbbac" * 3
    assert await asyncio.gather(*(use(held, name) for name in order)) == [f"http://{name}" for name in order]
    assert most[0] == max_loaded
    await held.close()
    assert not FakeServer.running


async def test_a_busy_model_leaves_when_its_answers_are_whole() -> None:
    held, _ = models("a", "b")
    first = held.find("a")
    await held.acquire(first)
    other = asyncio.create_task(use(held, "b"))
    while first.state is not State.LEAVING:
        await asyncio.sleep(0.01)
    again = asyncio.create_task(use(held, "a"))  # it takes no more, so that b isn't kept out
    await asyncio.sleep(0.05)
    assert not other.done()
    held.release(first)
    assert await other == "http://b"
    assert await again == "http://a"
    await held.close()


async def test_what_does_not_start_says_why_and_harms_nobody() -> None:
    held, _ = models("broken", "b")
    with pytest.raises(EngineFailed, match="broken can't be loaded: no such file"):
        await use(held, "broken")
    with pytest.raises(EngineFailed, match="no such file"):  # not tried again at once
        await use(held, "broken")
    assert await use(held, "b") == "http://b"
    with pytest.raises(UnknownModel, match="these are: broken, b"):
        held.find("gpt")
    await held.close()


async def test_a_process_that_died_is_started_again() -> None:
    held, _ = models("a")
    looking = asyncio.create_task(held.keep_looking())
    await use(held, "a")
    FakeServer.running.clear()
    while held.find("a").state is State.LOADED:
        await asyncio.sleep(0.01)
    assert await use(held, "a") == "http://a"
    assert held.find("a").num_loads == 2
    looking.cancel()
    await held.close()


async def test_a_process_that_hangs_is_ended_though_its_answers_never_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stemma_router.models.loaded.HUNG_S", 0.0)
    gate, said = threading.Event(), asyncio.Event()
    gate.set()
    FakeServer.running = set()

    async def answers(url: str) -> bool:
        return not (url == "http://a" and said.is_set())

    makers = {name: partial(FakeServer, name, gate, [0]) for name in "ab"}
    held = Models(makers, max_loaded=1, answers=answers)
    looking = asyncio.create_task(held.keep_looking())
    await held.acquire(held.find("a"))  # never released
    other = asyncio.create_task(use(held, "b"))
    said.set()
    assert await other == "http://b"
    looking.cancel()
    await held.close()


async def test_what_idles_is_unloaded() -> None:
    held, _ = models("a", idle_s=0.0)
    looking = asyncio.create_task(held.keep_looking())
    await use(held, "a")
    while held.find("a").state is not State.UNLOADED:
        await asyncio.sleep(0.01)
    assert not FakeServer.running
    looking.cancel()
    await held.close()


def test_names_and_flags_of_each_model() -> None:
    assert named_models(["org/qwen", "b=x/file.gguf", "y/z.gguf"]) == {
        "qwen": "org/qwen",
        "b": "x/file.gguf",
        "z": "y/z.gguf",
    }
    with pytest.raises(ConfigError, match="two models are called 'qwen'"):
        named_models(["org/qwen", "other/qwen"])
    flags = {"model": "m", "port": 80, "disk_cache": "/d", "lora": ["a=b"], "log_requests": True}
    settings = load_settings(flags=flags)
    assert child_flags(settings, None, flags, "q", 4, 2) == [
        "--disk-cache=/d/q",
        "--lora=a=b",
        "--log-requests",
        "--served-name=q",
        "--host=127.0.0.1",
        "--kv-cache-fraction=0.25",  # half of it on a CPU
        "--disk-cache-size=2500000000",
    ]
    with pytest.raises(ConfigError, match=r"NAME=MODEL, got '\.\.=x'"):
        named_models(["..=x"])


@pytest.mark.parametrize(
    "given",
    [{"memory_limit": 1}, {"kv_events": "tcp://127.0.0.1:1"}, {"tls_cert": "c.pem", "tls_key": "k.pem"}],
)
def test_what_one_server_alone_can_have_is_refused_wherever_it_is_set(given: dict[str, Any]) -> None:
    variables = {f"STEMMA_{name.upper()}": str(value) for name, value in given.items()}
    with pytest.raises(ConfigError, match="is for one model"):
        check_shareable(load_settings(environ=variables, flags={"model": "m"}))
    check_shareable(load_settings(flags={"model": "m", "api_key": "k", "host_cache": "1GB"}))


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream("a")
    yield server
    server.stop()


class Behind(FakeServer):
    """A model whose requests a real server answers."""

    behind = ""

    def start(self) -> None:
        super().start()
        self.url = self.behind


async def called(app: FastAPI, body: dict[str, Any], *, leave_after: bytes) -> bytes:
    """Return what a client got that leaves once it has seen `leave_after`."""
    got, left = b"", asyncio.Event()
    messages = [{"type": "http.request", "body": orjson.dumps(body), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal got
        got += message.get("body", b"")
        if leave_after in got:
            left.set()
            await asyncio.sleep(0.01)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": headers,
    }
    scope |= {"http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    await app(scope, receive, send)
    return got


@pytest.mark.parametrize("leave_after", [b": a is", b"data: a 0"])
async def test_a_client_that_leaves_a_stream_gives_its_place_and_its_bytes_back(
    upstream: Upstream, leave_after: bytes
) -> None:
    gate = threading.Event()
    FakeServer.running, Behind.behind = set(), upstream.url
    held = Models({name: partial(Behind, name, gate, [0]) for name in "ab"}, max_loaded=1)
    options = RouteOptions(access=Access(ServerSettings()))
    relay = Relay(relay_client(), options)
    app = make_front(held, {}, relay, options)
    asking = asyncio.create_task(
        called(app, {"model": "a", "stream": True, "prompt": "x" * 99}, leave_after=leave_after)
    )
    while held.find("a").state is not State.LOADING:
        await asyncio.sleep(0.01)
    if leave_after.startswith(b"data"):  # who stays: while the model is loaded the body is held
        assert relay.bodies.held() > 99
    gate.set()
    assert leave_after in await asking
    async with asyncio.timeout(10):
        assert await use(held, "b")
    assert (held.find("a").num_under_way, held.find("a").num_waiting, relay.bodies.held()) == (0, 0, 0)
    await held.close()
    await relay.client.aclose()
