"""Receives the KV events of one server, Stemma's or vLLM's, for a `EventFollower`.

When the connection is made, a server of Stemma's is asked for a snapshot: all blocks that it holds. Missed
messages are asked for at the replay socket, then a snapshot. If there is none (vLLM's), all that is known of
the server is dropped.

Silence alone says nothing: a server whose cache doesn't change sends nothing. So the connection has
heartbeats, which any ZMQ peer answers: a machine that vanished is noticed, and connected to again once it is
back. What a server that can't be reached held is forgotten after half a minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from stemma_router.events.follower import EventFollower
from stemma_router.kv_events.schema import SNAPSHOT, MalformedEvents, decode

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
REPLAY_TIMEOUT_S = 2.0
SNAPSHOT_TIMEOUT_S = 30.0
HEARTBEAT_S = 2.0
HEARTBEAT_TIMEOUT_S = 6.0
_LONGEST_RECONNECT_S = 2.0
UNREACHED_S = 5.0
"""Without a connection it is told."""
STALE_S = 30.0
"""Without a connection what is known is forgotten."""
LOOK_EVERY_S = 1.0
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_END = (-1).to_bytes(8, "big", signed=True)


Apply = Callable[[Callable[[], None]], Awaitable[None]]


async def _at_once(work: Callable[[], None]) -> None:
    work()


class Subscription:
    """Receives the messages of one server for a `EventFollower`. For one event loop."""

    def __init__(
        self,
        follower: EventFollower,
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
        self.num_aged = 0
        """Times that what was known was forgotten, since the server couldn't be reached."""
        self.is_connected = False
        self.replay_answers: bool | None = None
        """Whether the replay address answered when it was asked last; None: it wasn't."""
        self.heard_at: float | None = None
        """When the latest message came, by the event loop's clock; None: none did."""
        self._lost_at: float | None = None
        """Since when there is no connection; None: there is one, or what was known is forgotten."""
        self._is_told = False

    async def run(self) -> None:
        """Follow the server until cancelled; reconnects by itself."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * HEARTBEAT_S))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * HEARTBEAT_TIMEOUT_S))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, round(1000 * HEARTBEAT_TIMEOUT_S))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, round(1000 * _LONGEST_RECONNECT_S))
        socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        monitor = socket.get_monitor_socket(_MONITORED)
        self._lost_at = asyncio.get_running_loop().time()
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            socket.connect(self._endpoint)
            while True:
                ready = dict(await poller.poll(round(1000 * LOOK_EVERY_S)))
                if monitor in ready:
                    told = parse_monitor_message(await monitor.recv_multipart())
                    if told["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        await self._connected(context)
                    else:
                        self._disconnected()
                elif socket in ready:
                    self.heard_at = asyncio.get_running_loop().time()
                    frames = await socket.recv_multipart()
                    if len(frames) == 3 and len(frames[1]) == 8:
                        await self._receive(context, int.from_bytes(frames[1], "big"), frames[2])
                await self._age()
        finally:
            socket.disable_monitor()
            context.destroy(linger=0)

    async def _connected(self, context: zmq.asyncio.Context) -> None:
        """Begin anew: the server may be another process, whose numbers look like the next of the last one."""
        self.is_connected, self._lost_at = True, None
        if self._is_told:
            self._is_told = False
            logger.warning("%s: KV events are followed again", self._endpoint)
        is_restart, self._is_restart = self._is_restart, False
        if await self._snapshot(context):
            return
        await self._apply_on(self._follower.restart if is_restart else self._follower.clear)
        self._expected = 0
        await self._replay(context)

    def _disconnected(self) -> None:
        if self.is_connected:
            self.is_connected, self._lost_at = False, asyncio.get_running_loop().time()

    async def _age(self) -> None:
        """Tell that the server can't be reached, and then forget what it held."""
        if self._lost_at is None:
            return
        silent_s = asyncio.get_running_loop().time() - self._lost_at
        if silent_s > UNREACHED_S and not self._is_told:
            self._is_told = True
            logger.warning("%s: no KV events come from there: is the address right?", self._endpoint)
        if silent_s > STALE_S:
            self._lost_at = None
            self.num_aged += 1
            await self._apply_on(self._follower.clear)

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
        async with _at_most(REPLAY_TIMEOUT_S), self._asked(context, first) as answers:
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
        async with _at_most(SNAPSHOT_TIMEOUT_S), self._asked(context, SNAPSHOT) as answers:
            async for sequence, payload in answers:
                if not is_told:
                    await self._apply_on(self._follower.clear)
                is_told = True
                await self._apply(sequence - 1, payload)
            self.num_snapshots += is_told
            self._note_answer(answers=True)
            return is_told
        self._note_answer(answers=False)
        if is_told:  # a part of them, late: what is missing would be taken for evicted
            await self._apply_on(self._follower.clear)
        return False

    def _note_answer(self, *, answers: bool) -> None:
        if self._replay_endpoint is not None:
            if not answers and self.replay_answers is not False:
                logger.warning("%s: no answer from the replay address", self._replay_endpoint)
            self.replay_answers = answers

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
