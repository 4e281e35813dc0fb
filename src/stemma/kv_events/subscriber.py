"""Receives the KV events of one server, Stemma's or vLLM's, for a `Follower`.

When the connection is made, a server of Stemma's is asked for a snapshot: all blocks that it holds. Missed
messages are asked for at the replay socket, then a snapshot. If there is none (vLLM's), all that is known of
the server is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import zmq
import zmq.asyncio

from stemma.kv_events.follower import Follower
from stemma.kv_events.schema import SNAPSHOT, MalformedEvents, decode

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
_REPLAY_TIMEOUT_S = 2.0
_SNAPSHOT_TIMEOUT_S = 30.0
_END = (-1).to_bytes(8, "big", signed=True)


Apply = Callable[[Callable[[], None]], Awaitable[None]]


async def _at_once(work: Callable[[], None]) -> None:
    work()


class Subscription:
    """Receives the messages of one server for a `Follower`. For one event loop."""

    def __init__(
        self,
        follower: Follower,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        is_restart: bool = False,
        apply: Apply = _at_once,
    ) -> None:
        """`is_restart`: this server has taken over the disk tier of the one that `follower` knows.

        `apply` runs what changes the follower, one call after the other, perhaps on another thread.
        """
        self._apply_on = apply
        self._follower = follower
        self._is_restart = is_restart
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._expected = 0
        self._is_live = False
        """A message came in order since the last replay."""
        self.num_gaps = 0
        """Times that messages were missing, replayed or not."""
        self.num_lost = 0
        """Gaps whose messages couldn't be had any more, nor a snapshot."""
        self.num_snapshots = 0
        self.num_malformed = 0

    async def run(self) -> None:
        """Follow the server until cancelled; reconnects by itself."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED)
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            socket.connect(self._endpoint)
            while True:
                ready = dict(await poller.poll())
                if monitor in ready:
                    await monitor.recv_multipart()
                    await self._connected(context)
                elif socket in ready:
                    frames = await socket.recv_multipart()
                    if len(frames) == 3 and len(frames[1]) == 8:
                        await self._receive(context, int.from_bytes(frames[1], "big"), frames[2])
        finally:
            socket.disable_monitor()
            context.destroy(linger=0)

    async def _connected(self, context: zmq.asyncio.Context) -> None:
        """Begin anew: the server may be another process, whose numbers look like the next of the last one."""
        is_restart, self._is_restart = self._is_restart, False
        if await self._snapshot(context):
            return
        await self._apply_on(self._follower.restart if is_restart else self._follower.clear)
        self._expected = 0
        await self._replay(context)

    async def _receive(self, context: zmq.asyncio.Context, sequence: int, payload: bytes) -> None:
        if sequence < self._expected:
            if not self._is_live:
                return  # it waited in the socket while the replay brought it too
            # The server was started anew: it counts from 0 again, and holds nothing that we know of.
            await self._apply_on(self._follower.clear)
            self._expected = 0
        if sequence > self._expected:
            self.num_gaps += 1
            await self._fill_gap(context, sequence)
            if sequence < self._expected:
                return
        self._is_live = True
        await self._apply(sequence, payload)

    async def _apply(self, sequence: int, payload: bytes) -> None:
        self._expected = sequence + 1
        try:
            await self._apply_on(lambda: self._follower.take(decode(payload)))
        except MalformedEvents as error:
            self.num_malformed += 1
            if self.num_malformed == 1:
                logger.warning("%s: a message isn't a batch of KV events: %s", self._endpoint, error.reason)

    async def _fill_gap(self, context: zmq.asyncio.Context, sequence: int) -> None:
        """Get the messages before `sequence`, or all live blocks; else drop all that is known."""
        await self._replay(context, from_here=True)
        if sequence <= self._expected or await self._snapshot(context):
            return
        self.num_lost += 1
        logger.warning("%s: messages are lost", self._endpoint)
        await self._replay(context)
        if sequence > self._expected:
            await self._apply_on(self._follower.clear)
            self._expected = sequence

    async def _replay(self, context: zmq.asyncio.Context, *, from_here: bool = False) -> None:
        """Ask for the messages from `_expected` on; without an answer in time, go on without them.

        `from_here`: if the first of them isn't kept any more, take none.
        """
        first = self._expected.to_bytes(8, "big")
        async with _at_most(_REPLAY_TIMEOUT_S), self._asked(context, first) as answers:
            async for sequence, payload in answers:
                if sequence > self._expected and from_here:
                    return
                if sequence > self._expected:
                    await self._apply_on(self._follower.clear)  # what came before isn't kept any more
                if sequence >= self._expected:
                    await self._apply(sequence, payload)

    async def _snapshot(self, context: zmq.asyncio.Context) -> bool:
        """Ask for all live blocks; return whether the server has told them."""
        is_told = False
        async with _at_most(_SNAPSHOT_TIMEOUT_S), self._asked(context, SNAPSHOT) as answers:
            async for sequence, payload in answers:
                if not is_told:
                    await self._apply_on(self._follower.clear)
                is_told = True
                await self._apply(sequence - 1, payload)
            self.num_snapshots += is_told
            return is_told
        if is_told:  # a part of them, late: what is missing would be taken for evicted
            await self._apply_on(self._follower.clear)
        return False

    @asynccontextmanager
    async def _asked(
        self, context: zmq.asyncio.Context, question: bytes
    ) -> AsyncIterator[AsyncIterator[tuple[int, bytes]]]:
        """Ask the replay socket; yield the messages that it answers with, each with its number."""
        socket = context.socket(zmq.DEALER)  # one request, many answers
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(0)

        async def answers() -> AsyncIterator[tuple[int, bytes]]:
            while self._replay_endpoint is not None:
                frames = await socket.recv_multipart()
                if len(frames) < 3 or len(frames[-2]) != 8 or frames[-2] == _END:
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]

        try:
            if self._replay_endpoint is not None:
                self._is_live = False
                socket.connect(self._replay_endpoint)
                await socket.send_multipart((b"", question))
            yield answers()
        finally:
            socket.close()


@asynccontextmanager
async def _at_most(seconds: float) -> AsyncIterator[None]:
    """End the block after `seconds`, and go on behind it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            yield
