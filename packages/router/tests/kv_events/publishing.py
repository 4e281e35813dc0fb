"""Publishers, followers, and a relay between them that loses messages when it is told to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import zmq
import zmq.asyncio

from stemma.memory.kv_events import BlocksStored
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.supervision import LoggingSupervisor
from stemma.types import BlockKey
from stemma_router.cluster.holdings import Holdings
from stemma_router.events.follower import EventFollower
from stemma_router.events.subscriber import Subscription
from stemma_router.kv_events.names import chain_of
from stemma_router.kv_events.publisher import KVEventPublisher

SIZE = 4
LOOPBACK = "tcp://127.0.0.1:*"


def start(
    endpoint: str = LOOPBACK,
    replay: str | None = LOOPBACK,
    names_path: Path | None = None,
    *,
    has_checkpoints: bool = False,
) -> KVEventPublisher:
    return KVEventPublisher(
        endpoint,
        replay,
        block_size=SIZE,
        supervisor=LoggingSupervisor(),
        names_path=names_path,
        has_checkpoints=has_checkpoints,
    )


def stored(number: int) -> BlocksStored:
    return BlocksStored((key(number),), None, tokens(number), DEFAULT_NAMESPACE)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def tokens(number: int) -> np.ndarray:
    return np.full(SIZE, number, dtype=np.int32)


def held(holdings: Holdings, numbers: range) -> list[int]:
    return [n for n in numbers if holdings.depths(chain_of(tokens(n), SIZE), 1) == [1]]


class Following:
    """A subscription that runs for the time of a test."""

    def __init__(self, endpoint: str, replay: str | None) -> None:
        self.holdings = Holdings(secret=1)
        self.follower = EventFollower(0, self.holdings)
        self.subscription = Subscription(self.follower, endpoint, replay)

    async def __aenter__(self) -> Following:
        self._task = asyncio.create_task(self.subscription.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def sees(self, expected: list[int], numbers: range) -> None:
        async with asyncio.timeout(10):
            while held(self.holdings, numbers) != expected:
                await asyncio.sleep(0.01)


class Relay:
    """Passes on the messages of a publisher, or loses them."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._source = self._context.socket(zmq.SUB)
        self._source.subscribe(b"")
        self._source.connect(endpoint)
        self._out = self._context.socket(zmq.PUB)
        self._out.bind(LOOPBACK)
        self.endpoint = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self.loses = False
        self.num_passed = self.num_lost = 0

    async def __aenter__(self) -> Relay:
        self._task = asyncio.create_task(self._pass_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _pass_on(self) -> None:
        while True:
            frames = await self._source.recv_multipart()
            if self.loses:
                self.num_lost += 1
            else:
                await self._out.send_multipart(frames)
                self.num_passed += 1


async def lose(relay: Relay, publisher: KVEventPublisher, count: int) -> None:
    """Publish messages that don't arrive, of blocks 1, 2 and so on."""
    relay.loses = True
    for number in range(1, count + 1):
        publisher.put(stored(number))
        async with asyncio.timeout(20):
            while relay.num_lost < number:  # one at a time: events that wait together go in one message
                await asyncio.sleep(0.005)
    relay.loses = False


class Wire:
    """A TCP connection to a publisher that can go dead without a word, as that of a machine that vanishes."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.go_dead()
        for writer in self._writers:
            writer.close()

    def go_dead(self) -> None:
        """Pass nothing on any more for connections that are there; new ones work."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, there[1]]
        for source, target in ((reader, there[1]), (there[0], writer)):
            self._tasks.add(asyncio.create_task(self._pass_on(source, target)))

    @staticmethod
    async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            target.write(data)
            await target.drain()
        target.close()
