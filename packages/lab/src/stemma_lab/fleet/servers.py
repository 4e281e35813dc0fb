"""Simulated servers, and the network that the real proxy's client reaches them by.

A request waits for one of its server's seats. A server computes one prompt after the other, in the order of
arrival; the answers that it has share the steps of decoding, and slow each other (`decoding.py`). It tells
its load as Stemma does. It fails as servers do: it hangs, answers garbage, dies, drains, or becomes slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx
import orjson

from stemma.told import Told, ToldLoad
from stemma_lab.fleet.caches import CacheChange, RunCache
from stemma_lab.fleet.decoding import DecodeModel, Decoding
from stemma_lab.fleet.seats import Seat, SimulatedSeats
from stemma_lab.fleet.traffic import Traffic
from stemma_lab.savings import PrefillModel

TOLD_TOKENS = "x-stemma-cached-tokens"
"""Header of an answer: prompt tokens that were cached."""
_STREAM = {"content-type": "text/event-stream"}
_CRAWL = 10.0


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
    CRAWLS = "crawls"
    """Everything takes ten times as long."""


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What all servers have in common."""

    capacity_blocks: int
    prefill: PrefillModel
    decode: DecodeModel
    num_seats: int


Tell = Callable[["SimulatedServer", CacheChange], None]


class SimulatedServer:
    """One server. `tell` gets what changes in its cache, once a prompt or an answer is computed."""

    def __init__(self, host: str, model: ServerModel, traffic: Traffic, tell: Tell) -> None:
        self.host = host
        self.cache = RunCache(model.capacity_blocks)
        self.mode = Mode.SERVES
        self.num_requests = 0
        """That it was sent for text."""
        self._model = model
        self._traffic = traffic
        self._tell = tell
        self._begin_empty()
        self._runs = asyncio.Event()
        self._runs.set()
        self._work: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}"

    def _begin_empty(self) -> None:
        self._prefill = asyncio.Lock()
        self._seats = SimulatedSeats(self._model.num_seats)
        self._decoding = Decoding(self._model.decode)

    def become(self, mode: Mode) -> None:
        """Change what it does. One that is gone has lost its cache."""
        self.mode = mode
        self._decoding.slowdown = self._slowdown
        if mode is Mode.HANGS:
            self._runs.clear()
        else:
            self._runs.set()
        if mode is Mode.GONE:
            self.cache = RunCache(self._model.capacity_blocks)
            for work in tuple(self._work):
                work.cancel()
            self._begin_empty()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer a check, or a request whose content is its number. Raises HTTPError."""
        if self.mode is Mode.GONE:
            raise httpx.ConnectError("nobody listens", request=request)
        if request.url.path == "/health":
            await self._unless_killed(self._wake())
            told = orjson.dumps(self._told().as_json())
            return httpx.Response(503 if self.mode is Mode.DRAINS else 200, content=told)
        if self.mode is Mode.DRAINS:
            return httpx.Response(503, content=b"{}")
        if self.mode is Mode.GARBAGE:
            return httpx.Response(200, headers=_STREAM, stream=httpx.ByteStream(b"\x00\xff garbage"))
        self.num_requests += 1
        number = int(request.content)
        seat = Seat(self._seats)
        cached = await self._unless_killed(self._compute(number, seat))
        headers = {TOLD_TOKENS: str(cached)}
        if request.headers["accept"] != "application/json":
            return httpx.Response(200, headers={**_STREAM, **headers}, stream=_Answer(self, number, seat))
        await self.decode(number, seat)
        usage = {"completion_tokens": int(self._traffic.output_tokens[number])}
        return httpx.Response(200, headers=headers, json={"usage": usage})

    def _told(self) -> Told:
        model, slowdown = self._model, self._slowdown
        load = ToldLoad(
            seats=model.num_seats,
            running=self._seats.num_seated,
            waiting=self._seats.num_waiting,
            seat_s=self._seats.held_s.mean_s or None,
            answer_tokens=self._seats.answer_tokens.mean_s or None,
            prefill_s_per_token=slowdown / model.prefill.tokens_per_s,
            row_s=slowdown * model.decode.row_s or None,
        )
        return Told(load=load)

    @property
    def _slowdown(self) -> float:
        return _CRAWL if self.mode is Mode.CRAWLS else 1.0

    async def _wake(self) -> None:
        await self._runs.wait()

    async def _compute(self, number: int, seat: Seat) -> int:
        """Wait for a seat and compute a prompt; return its cached tokens."""
        traffic, model = self._traffic, self._model
        chain = traffic.chain(int(traffic.prompt_runs[number]))
        sizes = traffic.sizes(chain)
        try:
            await seat.take()
            async with self._prefill:
                await self._runs.wait()
                length = int(traffic.input_tokens[number])
                cached = min(self.cache.num_cached(chain, sizes) * traffic.block_size, max(0, length - 1))
                await asyncio.sleep(self._slowdown * float(model.prefill.seconds(cached, length)))
                await self._runs.wait()
                self._use(chain, sizes)
        except BaseException:
            seat.leave()
            raise
        return cached

    async def decode(self, number: int, seat: Seat) -> None:
        """Generate the rest of an answer. Raises ReadError if the server is killed meanwhile."""
        try:
            await self._unless_killed(self._decode(number))
        finally:
            seat.leave(int(self._traffic.output_tokens[number]))

    async def _decode(self, number: int) -> None:
        traffic = self._traffic
        await self._decoding.run(float(traffic.output_tokens[number]))
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

    def __init__(self, server: SimulatedServer, number: int, seat: Seat) -> None:
        self._server = server
        self._number = number
        self._seat = seat

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'data: {"text": "first"}\n\n'
        await self._server.decode(self._number, self._seat)
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        """The reader is done, or has left."""
        self._seat.leave()


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
