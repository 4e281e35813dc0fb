"""A replica: an engine and the whole server application over it, called through Ray instead of a socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from starlette.types import Message

from stemma.config.settings import Settings
from stemma.engine.async_engine import AsyncEngine
from stemma.errors import EngineFailed
from stemma.server.app import create_app
from stemma.server.door.access import is_loopback
from stemma_router.cluster.replica_calls import ReplicaCall, ReplicaPlace
from stemma_router.cluster.slots import DirectorySlot, take_slot
from stemma_router.cluster_file import ClusterFile

_LEAVE_TIMEOUT_S = 5.0
"""Time for a request to end after its caller has left."""
AnswerHead = tuple[int, list[tuple[bytes, bytes]]]
"""Status and headers."""


class Replica:
    """An engine that Ray Serve runs as one process. Raises what loading a server raises."""

    def __init__(self, cluster: ClusterFile) -> None:
        assert cluster.replicas is not None
        self._slot: DirectorySlot | None = None
        settings = cluster.settings
        folder = settings.engine.tiers.disk_cache
        if folder is not None:
            wait_s = cluster.replicas.ray.graceful_shutdown_s
            self._slot = take_slot(Path(folder), cluster.replicas.at_most, wait_s)
        try:
            self._engine = AsyncEngine.from_settings(_own_settings(settings, self._slot).engine)
        except BaseException:
            if self._slot is not None:
                self._slot.close()
            raise
        self._app = create_app(self._engine, settings)
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._has_started = False

    def record_replica_metadata(self) -> dict[str, str | int | None]:
        """Called by Ray Serve once the replica is ready: what routers are told of it."""
        publisher = self._engine.parts.kv_events
        disk = None
        if self._slot is not None:
            disk = f"{ray.get_runtime_context().get_node_id()}:{self._slot.path.resolve()}"
        assert publisher is not None
        place = ReplicaPlace(publisher.endpoint, publisher.replay_endpoint, disk, os.getpid())
        return place.as_dict()

    async def check_health(self) -> None:
        """Called by Ray Serve now and then; a replica whose engine has failed is replaced."""
        if self._engine.failure is not None:
            raise EngineFailed(self._engine.failure)

    async def answer(self, call: ReplicaCall) -> AsyncIterator[AnswerHead | bytes]:
        """Yield status and headers, then the body's bytes as they come. Closing early aborts the request."""
        if not self._has_started:
            self._has_started = True
            await self._lifespan.__aenter__()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        body: asyncio.Queue[Message] = asyncio.Queue()
        body.put_nowait({"type": "http.request", "body": call.content, "more_body": False})

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        running = asyncio.ensure_future(self._app(_scope(call), body.get, send))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message.get("headers", ())]
                    continue
                chunks = [message.get("body", b"")]
                while not messages.empty() and (further := messages.get_nowait()) is not None:
                    chunks.append(further.get("body", b""))
                    message = further
                if any(chunks):
                    yield b"".join(chunks)
                if not message.get("more_body", False):
                    break
        finally:
            body.put_nowait({"type": "http.disconnect"})
            await asyncio.wait({running}, timeout=_LEAVE_TIMEOUT_S)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def __del__(self) -> None:
        """Called by Ray Serve once running requests have ended, or their time is over."""
        if self._has_started:
            self._has_started = False
            await self._lifespan.__aexit__(None, None, None)
        engine = self.__dict__.pop("_engine", None)  # missing if it couldn't be made
        if engine is not None:
            await asyncio.to_thread(engine.close)
        if self._slot is not None:
            self._slot.close()
            self._slot = None


def _own_settings(settings: Settings, slot: DirectorySlot | None) -> Settings:
    """Return the settings with what belongs to this replica alone: its events and its disk directory."""
    address = ray.util.get_node_ip_address()
    events = f"tcp://{'127.0.0.1' if is_loopback(address) else address}:*"
    cache = settings.engine.cache.model_copy(update={"kv_events": events, "kv_events_replay": events})
    tiers = settings.engine.tiers
    if slot is not None:
        tiers = tiers.model_copy(update={"disk_cache": slot.path})
    engine = settings.engine.model_copy(update={"cache": cache, "tiers": tiers})
    return settings.model_copy(update={"engine": engine})


def _scope(call: ReplicaCall) -> dict[str, Any]:
    path, _, query = call.path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [*call.headers, (b"host", b"localhost")],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
        "state": {},
    }
