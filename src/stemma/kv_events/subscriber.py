"""Follows the KV events of one server, Stemma's or vLLM's, and keeps a router's holdings up to date.

Events of a server name blocks by its own hashes. With the tokens that come along, each is mapped to the name
that the router computes from a prompt (`cluster.holdings.chain_of`). Missed messages are asked for at the
replay socket; if they can't be had, all that is known of the server is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import xxhash
import zmq
import zmq.asyncio

from stemma.kv_events.schema import (
    GPU,
    STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Hash,
    MalformedEvents,
    decode,
)
from stemma.types import TokenArray

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_BLOCKS = 4_000_000
"""Blocks of one server whose names are remembered; further ones are ignored."""
_REPLAY_TIMEOUT_S = 2.0
_END = (-1).to_bytes(8, "big", signed=True)


class HoldingsOf(Protocol):
    """The table that a follower writes to (`cluster.holdings.Holdings`)."""

    def store(self, replica: int, ids: Sequence[int], tier: str) -> None:
        """Note blocks that a replica now holds."""

    def remove(self, replica: int, ids: Sequence[int], tier: str) -> None:
        """Note blocks that left a tier of a replica."""

    def clear(self, replica: int, keep: str | None = None) -> None:
        """Note that nothing is known of a replica, except of its tier `keep`."""


Namer = Callable[[TokenArray, int, int], list[int]]


class Follower:
    """Translates the events of one replica. Not thread-safe."""

    def __init__(self, replica: int, holdings: HoldingsOf, name_blocks: Namer) -> None:
        """`name_blocks` is `chain_of`: tokens, block size, name of the parent -> names."""
        self._replica = replica
        self._holdings = holdings
        self._name_blocks = name_blocks
        self._names: dict[Hash, int] = {}
        self._tiers: dict[Hash, set[str]] = {}
        """The tiers that hold a block."""
        self.block_size: int | None = None
        """Block size of the server; None before its first event."""

    def take(self, events: Sequence[Event]) -> None:
        """Apply a batch, in order."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.clear()

    def clear(self) -> None:
        """Drop all that is known of the server."""
        self._names.clear()
        self._tiers.clear()
        self._holdings.clear(self._replica)

    def restart(self) -> None:
        """Another process has taken over the server's disk tier: only what lay there is still known."""
        for one in [one for one, tiers in self._tiers.items() if STORAGE not in tiers]:
            del self._tiers[one], self._names[one]
        for tiers in self._tiers.values():
            tiers.intersection_update({STORAGE})
        self._holdings.clear(self._replica, keep=STORAGE)

    def _store(self, event: BlockStored) -> None:
        if event.token_ids:
            names = self._named(event)
            known = event.block_hashes[: len(names)]
        else:
            known = [one for one in event.block_hashes if one in self._names]
            names = [self._names[one] for one in known]
        for one in known:
            self._tiers.setdefault(one, set()).add(event.medium or GPU)
        self._holdings.store(self._replica, names, event.medium or GPU)

    def _named(self, event: BlockStored) -> list[int]:
        count, size = len(event.block_hashes), event.block_size
        is_sound = 0 < size <= 65536 and len(event.token_ids) == count * size
        if not is_sound or len(self._names) + count > MAX_BLOCKS:
            return []
        if event.parent_block_hash is None:
            parent: int | None = adapter_root(event.lora_name)
        else:
            parent = self._names.get(event.parent_block_hash)
        if parent is None or not all(0 <= token < 2**31 for token in event.token_ids):
            return []
        self.block_size = size
        names = self._name_blocks(np.asarray(event.token_ids, dtype=np.int32), size, parent)
        self._names.update(zip(event.block_hashes, names, strict=True))
        return names

    def _remove(self, event: BlockRemoved) -> None:
        known = [one for one in dict.fromkeys(event.block_hashes) if one in self._names]
        self._holdings.remove(self._replica, [self._names[one] for one in known], event.medium or GPU)
        for one in known:
            self._tiers[one].discard(event.medium or GPU)
            if not self._tiers[one]:
                del self._tiers[one], self._names[one]


def adapter_root(name: str | None) -> int:
    """Return the name of the predecessor of a prompt's first block: 0, or a hash of the adapter's name."""
    return 0 if not name else xxhash.xxh3_64_intdigest(name.encode())


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
    ) -> None:
        """`is_restart`: this server has taken over the disk tier of the one that `follower` knows."""
        self._follower = follower
        self._is_restart = is_restart
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._expected = 0
        self._is_live = False
        """A message came in order since the last replay."""
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
        if self._is_restart:
            self._is_restart = False
            self._follower.restart()
        else:
            self._follower.clear()
        self._expected = 0
        await self._replay(context)

    async def _receive(self, context: zmq.asyncio.Context, sequence: int, payload: bytes) -> None:
        if sequence < self._expected:
            if not self._is_live:
                return  # it waited in the socket while the replay brought it too
            # The server was started anew: it counts from 0 again, and holds nothing that we know of.
            self._follower.clear()
            self._expected = 0
        if sequence > self._expected:
            await self._replay(context)
            if sequence < self._expected:
                return
            if sequence > self._expected:
                logger.warning("%s: %d messages are lost", self._endpoint, sequence - self._expected)
                self._follower.clear()
        self._is_live = True
        self._apply(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._expected = sequence + 1
        try:
            self._follower.take(decode(payload))
        except MalformedEvents as error:
            self.num_malformed += 1
            if self.num_malformed == 1:
                logger.warning("%s: a message isn't a batch of KV events: %s", self._endpoint, error.reason)

    async def _replay(self, context: zmq.asyncio.Context) -> None:
        """Ask for the messages from `_expected` on; without an answer in time, go on without them."""
        if self._replay_endpoint is None:
            return
        self._is_live = False
        socket = context.socket(zmq.DEALER)  # one request, many answers
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart((b"", self._expected.to_bytes(8, "big")))
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 3 or len(frames[-2]) != 8 or frames[-2] == _END:
                        return
                    sequence = int.from_bytes(frames[-2], "big")
                    if sequence > self._expected:
                        self._follower.clear()  # what came before isn't kept any more
                    if sequence >= self._expected:
                        self._apply(sequence, frames[-1])
        except TimeoutError:
            return
        finally:
            socket.close()
