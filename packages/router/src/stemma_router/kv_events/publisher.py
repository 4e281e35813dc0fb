"""Publishes what the cache stores and evicts, on a thread of its own.

A message has three frames: topic, sequence number (8 bytes, big endian), batch. Subscribers that missed some
ask the replay socket (ROUTER) with the first number they lack, and get what is kept, then number -1. Where
events come faster than they can be sent, the oldest are dropped and `AllBlocksCleared` takes their place: who
believes too little asks for too much to be computed, who believes too much sends requests to the wrong place.

Who asks the replay socket for `SNAPSHOT` gets all live blocks, and with them the number of the first message
that they don't contain yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path

import zmq
from typing_extensions import override

from stemma.errors import ConfigError
from stemma.memory.kv_events import BlocksCopied, BlocksStored, CheckpointStored, KVEvent, KVEventSink
from stemma.supervision import Supervisor, start_thread
from stemma.types import Tier
from stemma_router.kv_events.live_blocks import LiveBlocks
from stemma_router.kv_events.schema import (
    CHECKPOINT_GROUP,
    CHECKPOINT_KIND,
    CPU,
    GPU,
    SNAPSHOT,
    STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    encode,
)

logger = logging.getLogger(__name__)

MAX_QUEUED = 100_000
KEPT_BATCHES = 10_000
_MAX_BATCH = 512
_POLL_S = 0.05
_HIGH_WATER_MARK = 100_000
_END = (-1).to_bytes(8, "big", signed=True)
_MEDIUM = {Tier.DEVICE: GPU, Tier.HOST: CPU, Tier.DISK: STORAGE, Tier.POOL: STORAGE}


class KVEventPublisher(KVEventSink):
    """A `KVEventSink` that publishes over ZMQ."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        block_size: int,
        supervisor: Supervisor,
        topic: str = "",
        names_path: Path | None = None,
        has_checkpoints: bool = False,
    ) -> None:
        """Listen on the endpoints (``tcp://127.0.0.1:5557``). Raises ConfigError if that isn't possible.

        `names_path`: a file in which names of blocks on disk outlive the process. `has_checkpoints`: prompts
        go on from checkpoints alone.
        """
        self._live = LiveBlocks(block_size, names_path, has_checkpoints=has_checkpoints)
        self._has_checkpoints = has_checkpoints
        self._block_size = block_size
        self._topic = topic.encode()
        self._queue: deque[KVEvent] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self.num_dropped = 0
        """Events that were dropped because they came too fast."""
        self._has_gap = False
        self._context = zmq.Context()
        try:
            self._out = self._bind(zmq.PUB, endpoint)
            self._replay = None if replay_endpoint is None else self._bind(zmq.ROUTER, replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"KV events can't be published: {error}") from error
        self._thread = start_thread("stemma-kv-events", self._run, supervisor)

    @property
    def endpoint(self) -> str:
        """Where the events are published; with the port, if any was asked for."""
        return self._out.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str | None:
        """Where missed events can be asked for."""
        return None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    @override
    def put(self, event: KVEvent) -> None:
        with self._lock:
            if len(self._queue) >= MAX_QUEUED:
                self._queue.popleft()
                self.num_dropped += 1
                self._has_gap = True
            self._queue.append(event)
        self._wake.set()

    def close(self) -> None:
        """Send what is queued and stop."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(_HIGH_WATER_MARK)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise zmq.ZMQError(error.errno, f"{endpoint}: {error.strerror}") from error
        return socket

    def _run(self) -> None:
        try:
            while not self._is_closing or self._queue:
                self._wake.wait(_POLL_S)
                self._wake.clear()
                while self._queue:
                    if events := self._take():
                        self._publish(events)
                if self._replay is not None:
                    self._serve_replays(self._replay)
        finally:
            self._live.close()
            self._context.destroy(linger=500)

    def _take(self) -> list[Event]:
        with self._lock:
            count = min(_MAX_BATCH, len(self._queue))
            taken = [self._queue.popleft() for _ in range(count)]
            has_gap, self._has_gap = self._has_gap, False
        events: list[Event] = []
        if has_gap:
            self._live.clear()
            events.append(AllBlocksCleared())
        told = (one for event in taken for one in self._live.note(event))
        return events + [
            wire_event(event, self._block_size, has_checkpoints=self._has_checkpoints) for event in told
        ]

    def _publish(self, events: list[Event]) -> None:
        payload = encode(time.time(), events)
        self._out.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
        self._kept.append((self._sequence, payload))
        self._sequence += 1

    def _serve_replays(self, socket: zmq.Socket[bytes]) -> None:
        while socket.poll(0):
            frames = socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            who, first = frames[0], int.from_bytes(frames[2], "big")
            if frames[2] == SNAPSHOT:
                self._send_snapshot(socket, who)
                continue
            for sequence, payload in self._kept:
                if sequence >= first:
                    socket.send_multipart((who, b"", self._topic, sequence.to_bytes(8, "big"), payload))
            socket.send_multipart((who, b"", b"", _END, b""))

    def _send_snapshot(self, socket: zmq.Socket[bytes], who: bytes) -> None:
        number = self._sequence.to_bytes(8, "big")
        for held in self._live.snapshot():
            socket.send_multipart((who, b"", self._topic, number, encode(time.time(), [held])))
        socket.send_multipart((who, b"", b"", _END, b""))


def wire_event(event: KVEvent, block_size: int, *, has_checkpoints: bool = False) -> Event:
    """Return an event of the cache as subscribers read it; `block_size` is the cache's."""
    if isinstance(event, CheckpointStored):
        return BlockStored(
            block_hashes=[event.key],
            parent_block_hash=event.behind,
            token_ids=[],
            block_size=block_size,
            lora_id=None,
            medium=_MEDIUM[event.tier],
            lora_name=None,
            group_idx=CHECKPOINT_GROUP,
            kv_cache_spec_kind=CHECKPOINT_KIND,
            has_checkpoints=True,
        )
    if isinstance(event, BlocksStored):
        name = event.namespace.adapter or None
        salt = event.namespace.salt
        extra: tuple[str, ...] = tuple(word for word in (name, salt) if word)
        return BlockStored(
            block_hashes=list(event.keys),
            parent_block_hash=event.parent,
            token_ids=event.tokens.tolist(),
            block_size=block_size,
            lora_id=None,
            medium=GPU,
            lora_name=name,
            extra_keys=[extra] * len(event.keys) if extra else None,
            has_checkpoints=has_checkpoints,
        )
    if isinstance(event, BlocksCopied):
        return BlockStored(list(event.keys), None, [], block_size, None, _MEDIUM[event.tier], None)
    return BlockRemoved(list(event.keys), _MEDIUM[event.tier])
