"""Simulated servers, and the network that the real proxy's client reaches them by.

A server computes one prompt after the other, in the order of arrival; decoding takes its own time and slows
nothing else. It fails as servers do: it hangs, answers garbage, dies, or drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from stemma.lab.fleet.caches import Change, RunCache
from stemma.lab.fleet.traffic import Traffic
from stemma.lab.savings import PrefillModel

TOLD_TOKENS = "x-stemma-cached-tokens"
"""Header of an answer: prompt tokens that were cached."""
_STREAM = {"content-type": "text/event-stream"}


class Mode(StrEnum):
    """What a server does with requests."""

    SERVES = "serves"
    HANGS = "hangs"
    """It takes connections, and answers nothing, checks included."""
    GARBAGE = "garbage"
    """It answers at once, with bytes that are no events. Checks are answered."""
    GONE = "gone"
    """Nobody listens; what it had under way was reset."""
    DRAINS = "drains"
    """It ends what it has and refuses the rest with 503."""


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What all servers have in common."""

    capacity_blocks: int
    prefill: PrefillModel
    decode_tokens_per_s: float


Tell = Callable[["SimulatedServer", Change], None]


class SimulatedServer:
    """One server. `tell` gets what changes in its cache, once a prompt or an answer is computed."""

    def __init__(self, host: str, model: ServerModel, traffic: Traffic, tell: Tell) -> None:
        self.host = host
        self.cache = RunCache(model.capacity_blocks)
        self.mode = Mode.SERVES
        self._model = model
        self._traffic = traffic
        self._tell = tell
        self._prefill = asyncio.Lock()
        self._runs = asyncio.Event()
        self._runs.set()
        self._work: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}"

    def become(self, mode: Mode) -> None:
        """Change what it does. One that is gone has lost its cache."""
        self.mode = mode
        if mode is Mode.HANGS:
            self._runs.clear()
        else:
            self._runs.set()
        if mode is Mode.GONE:
            self.cache = RunCache(self._model.capacity_blocks)
            self._prefill = asyncio.Lock()
            for work in tuple(self._work):
                work.cancel()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer a check, or a request whose content is its number. Raises HTTPError."""
        if self.mode is Mode.GONE:
            raise httpx.ConnectError("nobody listens", request=request)
        if request.url.path == "/health":
            await self._unless_killed(self._wake())
            return httpx.Response(503 if self.mode is Mode.DRAINS else 200, content=b"{}")
        if self.mode is Mode.DRAINS:
            return httpx.Response(503, content=b"{}")
        if self.mode is Mode.GARBAGE:
            return httpx.Response(200, headers=_STREAM, stream=httpx.ByteStream(b"\x00\xff garbage"))
        number = int(request.content)
        cached = await self._unless_killed(self._compute(number))
        return httpx.Response(
            200, headers={**_STREAM, TOLD_TOKENS: str(cached)}, stream=_Answer(self, number)
        )

    async def _wake(self) -> None:
        await self._runs.wait()

    async def _compute(self, number: int) -> int:
        """Compute a prompt; return its cached tokens."""
        traffic, model = self._traffic, self._model
        chain = traffic.chain(int(traffic.prompt_runs[number]))
        sizes = traffic.sizes(chain)
        async with self._prefill:
            await self._runs.wait()
            length = int(traffic.input_tokens[number])
            cached = min(self.cache.num_cached(chain, sizes) * traffic.block_size, max(0, length - 1))
            await asyncio.sleep(float(model.prefill.seconds(cached, length)))
            await self._runs.wait()
            self._use(chain, sizes)
        return cached

    async def decode(self, number: int) -> None:
        """Generate the rest of an answer. Raises ReadError if the server is killed meanwhile."""
        await self._unless_killed(self._decode(number))

    async def _decode(self, number: int) -> None:
        traffic = self._traffic
        await asyncio.sleep(float(traffic.output_tokens[number]) / self._model.decode_tokens_per_s)
        await self._runs.wait()
        if traffic.answer_runs[number] >= 0:
            chain = traffic.chain(int(traffic.answer_runs[number]))
            self._use(chain, traffic.sizes(chain))

    def _use(self, chain: list[int], sizes: Sequence[int]) -> None:
        change = self.cache.use(chain, sizes)
        if change.stored or change.evicted:
            self._tell(self, change)

    async def _unless_killed(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do work; it ends with the client that left, and with the server."""
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.mode is not Mode.GONE or not task.cancelled():
                raise
            raise httpx.ReadError("the connection was reset") from None
        finally:
            self._work.discard(task)


class _Answer(httpx.AsyncByteStream):
    """The events of an answer: one as soon as the prompt is computed, and one at the end."""

    def __init__(self, server: SimulatedServer, number: int) -> None:
        self._server = server
        self._number = number

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'data: {"text": "first"}\n\n'
        await self._server.decode(self._number)
        yield b"data: [DONE]\n\n"


class Network(httpx.AsyncBaseTransport):
    """Brings requests to servers by host; nobody listens elsewhere."""

    def __init__(self) -> None:
        self.servers: dict[str, SimulatedServer] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer. Raises HTTPError."""
        server = self.servers.get(request.url.host)
        if server is None:
            raise httpx.ConnectError("nobody listens", request=request)
        return await server.answer(request)
