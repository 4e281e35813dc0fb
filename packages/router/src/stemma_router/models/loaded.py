"""Which models are loaded: one queue of loads, and the least valuable model makes room.

A model that waits for room names one that leaves. That one takes no further requests, and ends when those
under way have their answers, so that a busy model can't keep others out for ever; but it stays for as long as
its own load took, so that at most half the time goes into loading. For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from stemma.errors import EngineFailed, ShuttingDown, UnknownModel

_log = logging.getLogger(__name__)
RETRY_S = 10.0
"""How long a model that failed to start isn't started again."""
HUNG_S = 30.0
"""How long a server may say nothing before it is ended: else those that wait for its place would wait too."""
_MOST_WORDS = 300
"""Characters of a failure that clients are told; the log has all."""
_LOOK_S = 0.5
"""How often it is looked whether a process has died or idled for too long."""


class Server(Protocol):
    """A model's process. Its methods block."""

    url: str

    def start(self) -> None:
        """Start it; raise StemmaError with its last words if it dies before it is ready."""

    def stop(self) -> int:
        """Drain and stop it."""

    def kill(self) -> int:
        """End it at once."""

    def is_running(self) -> bool:
        """Return whether its process lives."""


class State(StrEnum):
    """Of one model."""

    UNLOADED = "unloaded"
    QUEUED = "queued"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"
    FAILED = "failed"


@dataclass(slots=True)
class Model:
    """One model, loaded or not. Times are those of the clock."""

    name: str
    make: Callable[[], Server]
    state: State = State.UNLOADED
    server: Server | None = None
    num_under_way: int = 0
    num_waiting: int = 0
    """Requests that wait for it to be loaded."""
    num_loads: int = 0
    used_at: float = 0.0
    heard_at: float = 0.0
    """When its server last said that it is well."""
    since: float = 0.0
    """When it came into its state."""
    load_s: float = 1.0
    """How long its last load took."""
    input_modalities: tuple[str, ...] = ()
    """What it reads, as its server told; empty: it hasn't yet."""
    failure: str = ""
    """Why its last load failed: the last line of what its process said."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_wanted(self) -> bool:
        """Whether it works for anybody, or somebody waits for it."""
        return self.num_under_way + self.num_waiting > 0

    def becomes(self, state: State, now: float) -> None:
        """Change the state, and wake who waits for that."""
        self.state, self.since = state, now
        self.changed.set()
        self.changed = asyncio.Event()

    def value(self, now: float) -> float:
        """Return what it is worth to keep: the seconds of its load, for each second that nobody used it."""
        return self.load_s / (now - self.used_at + 1e-3)


class Models:
    """All models by name, and those that are loaded: `max_loaded` at most."""

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Server]],
        *,
        max_loaded: int,
        idle_s: float | None = None,
        answers: Callable[[str], Awaitable[bool]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`makers` make a model's process, which isn't started yet. `idle_s`: unload what idles so long.

        `answers` asks a server by its URL whether it is well; one that isn't for `HUNG_S` is ended.
        """
        self.by_name = {name: Model(name, make) for name, make in makers.items()}
        self._max_loaded = max_loaded
        self._idle_s = idle_s
        self._answers = answers
        self._clock = clock
        self._loading = asyncio.Lock()
        """Fair: loads happen one by one, in the order in which they were asked for."""
        self._freed = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    @property
    def loaded(self) -> Sequence[Model]:
        """Those that answer now."""
        return [one for one in self.by_name.values() if one.state is State.LOADED]

    def find(self, name: str) -> Model:
        """Return the model of this name. Raises UnknownModel."""
        if (found := self.by_name.get(name)) is None:
            known = ", ".join(self.by_name)
            raise UnknownModel(
                f"the model {name[:200]!r} isn't served here; these are: {known}", param="model"
            )
        return found

    async def acquire(self, model: Model) -> str:
        """Return the URL of a model's server, loading it if need be; `release` follows.

        Raises EngineFailed if it doesn't start, ShuttingDown at the end.
        """
        model.num_waiting += 1
        try:
            while model.state is not State.LOADED:
                self._ask_for(model)
                await model.changed.wait()
                if model.state is State.FAILED:
                    raise EngineFailed(f"{model.name} can't be loaded: {model.failure}")
        finally:
            model.num_waiting -= 1
        assert model.server is not None
        model.num_under_way += 1
        model.used_at = self._clock()
        return model.server.url

    def release(self, model: Model) -> None:
        """Count a request of `acquire` as over."""
        model.num_under_way -= 1
        model.used_at = self._clock()
        self._freed.set()

    def _ask_for(self, model: Model) -> None:
        if self._is_closed:
            raise ShuttingDown("the server is shutting down")
        if model.state is State.FAILED and self._clock() < model.since + RETRY_S:
            raise EngineFailed(f"{model.name} can't be loaded: {model.failure}")
        if model.state in (State.UNLOADED, State.FAILED):
            model.becomes(State.QUEUED, self._clock())
            self._tasks[model.name] = asyncio.create_task(self._load(model))

    async def _load(self, model: Model) -> None:
        async with self._loading:
            try:
                await self._make_room()
                began = self._clock()
                model.becomes(State.LOADING, began)
                model.server = model.make()
                await asyncio.to_thread(model.server.start)
            except Exception as error:  # noqa: BLE001 - else who waits for it would wait for ever
                _log.error("%s can't be loaded: %s", model.name, error)
                last = [type(error).__name__, *str(error).splitlines()][-1]
                model.failure, model.server = last[:_MOST_WORDS], None
                model.becomes(State.FAILED, self._clock())
                return
        model.num_loads += 1
        model.load_s = max(self._clock() - began, 0.1)
        model.used_at = model.heard_at = self._clock()
        model.becomes(State.LOADED, self._clock())

    async def _make_room(self) -> None:
        """Unload until one more model may be loaded."""
        while True:
            held = [one for one in self.by_name.values() if one.state in (State.LOADED, State.LEAVING)]
            if len(held) < self._max_loaded:
                return
            leaving = next((one for one in held if one.state is State.LEAVING), None) or self._least(held)
            if leaving is None:
                await asyncio.sleep(_LOOK_S)
                continue
            if leaving.state is not State.LEAVING:
                leaving.becomes(State.LEAVING, self._clock())
            while leaving.num_under_way and leaving.state is State.LEAVING:
                self._freed.clear()
                await self._freed.wait()
            await self._unload(leaving)

    def _least(self, held: Sequence[Model]) -> Model | None:
        """Return the least valuable model; None: each is busy and hasn't been there for long enough."""
        now = self._clock()
        may_go = [one for one in held if not one.is_wanted or now >= one.since + one.load_s]
        return min(may_go, key=lambda one: one.value(now), default=None)

    async def _unload(self, model: Model) -> None:
        server, model.server = model.server, None
        if server is None:  # another task stops it
            if model.state is State.LEAVING:
                await model.changed.wait()
            return
        try:
            await asyncio.to_thread(server.stop)
        finally:
            model.becomes(State.UNLOADED, self._clock())

    async def keep_looking(self) -> None:
        """Notice processes that died or hang, and unload models that idle; for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            here = [one for one in self.by_name.values() if one.state in (State.LOADED, State.LEAVING)]
            for found in await asyncio.gather(*map(self._look_at, here), return_exceptions=True):
                if isinstance(found, Exception):
                    _log.error("a model can't be looked at: %s", found)

    async def _look_at(self, model: Model) -> None:
        server = model.server
        if server is None:  # it is being stopped
            return
        if not server.is_running() or await self._hangs(model, server):
            if model.server is not server:  # stopped meanwhile
                return
            model.server = None
            model.becomes(State.LEAVING, self._clock())  # it takes no request any more
            _log.error("the process of %s has died or hangs; the next request starts it again", model.name)
            await asyncio.to_thread(server.kill)
            model.becomes(State.UNLOADED, self._clock())
            self._freed.set()
            return
        now = self._clock()
        is_idle = model.state is State.LOADED and not model.is_wanted
        if self._idle_s is not None and is_idle and now - model.used_at >= self._idle_s:
            model.becomes(State.LEAVING, now)
            await self._unload(model)
            self._freed.set()

    async def _hangs(self, model: Model, server: Server) -> bool:
        if self._answers is None or await self._answers(server.url):
            model.heard_at = self._clock()
        return self._clock() - model.heard_at > HUNG_S

    async def close(self) -> None:
        """End all loads and all processes."""
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        servers = [one.server for one in self.by_name.values() if one.server is not None]
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers), return_exceptions=True)
        for model in self.by_name.values():
            model.server = None
            model.becomes(State.UNLOADED, self._clock())
