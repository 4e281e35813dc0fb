"""The engine behind asyncio: an `EngineClient` whose step loop has a thread of its own.

Three parties, joined by queues::

    event loop --commands--> step thread --news--> output thread --outputs--> event loop

The step thread owns the `Engine`; between two steps it works off the commands. The output thread turns
tokens into text, so that detokenization costs neither the step loop nor the event loop. Nothing the event
loop calls here blocks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from stemma.config.settings import EngineSettings, PoolSettings
from stemma.engine.api import EngineStats, GenerationRequest, RequestOutput
from stemma.engine.build import EngineParts, build_engine
from stemma.engine.core.engine import Engine, describe_error
from stemma.engine.operator.cache_control import CacheControl
from stemma.engine.output.output import OutputProcessor, SequenceNews
from stemma.errors import ConfigError, InvalidRequest, Overloaded, ShuttingDown, StemmaError
from stemma.model.loading import Progress

logger = logging.getLogger(__name__)
T = TypeVar("T")
_DRAIN_POLL_S = 0.02


@dataclass(slots=True)
class _Subscription:
    """Where the outputs of one request go."""

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | StemmaError] = field(default_factory=asyncio.Queue)
    has_started: bool = False


class AsyncEngine:
    """Serves requests from an event loop. Start it once the loop's process is set up; `close` it once."""

    def __init__(self, parts: EngineParts, *, max_waiting: int) -> None:
        self.model_name = parts.model_name
        self.max_model_len = parts.engine.limits.max_tokens
        self.tokenizer = parts.tokenizer
        self.default_sampling: Mapping[str, float | int] = parts.model.default_sampling
        self.eos_token_ids = parts.engine.limits.eos_token_ids
        self.pool = parts.pool
        self._engine: Engine = parts.engine
        self.cache_control = CacheControl(parts.engine.cache, parts.device, parts.key_space, self._call)
        self._max_waiting = max_waiting
        self._processor = OutputProcessor(parts.tokenizer, parts.engine.limits)
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._news: SimpleQueue[list[SequenceNews] | None] = SimpleQueue()
        self._subscriptions: dict[str, _Subscription] = {}
        self._is_draining = False
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run_steps, name="stemma-steps", daemon=True),
            threading.Thread(target=self._run_outputs, name="stemma-outputs", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def from_settings(cls, settings: EngineSettings, progress: Progress | None = None) -> AsyncEngine:
        """Load the checkpoint and start. Raises ModelError, UnsupportedModel or ConfigError."""
        return cls(build_engine(settings, progress), max_waiting=settings.scheduler.max_waiting)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """Queue a request and yield its outputs; closing the iterator early aborts the request.

        Raises InvalidRequest, PromptTooLong, Overloaded or ShuttingDown before the first output.
        """
        subscription = self._subscribe(request)
        self._commands.put(lambda: self._add(request))
        is_finished = False
        try:
            while not is_finished:
                output = await subscription.outputs.get()
                if isinstance(output, StemmaError):
                    is_finished = True
                    raise output
                is_finished = output.finished
                if is_finished and self.pool is not None:
                    await self.pool.settle(self._call)
                yield output
        finally:
            del self._subscriptions[request.request_id]
            if not is_finished:
                self._commands.put(lambda: self._abort(request.request_id))

    async def abort(self, request_id: str) -> None:
        """End a request with finish reason ABORT; unknown ids are ignored."""
        self._commands.put(lambda: self._abort(request_id))

    async def stats(self) -> EngineStats:
        """Return a consistent snapshot, taken between two steps."""
        return await self._call(self._engine.stats)

    async def draw_tree(self, max_tokens: int = 24) -> str:
        """Return the prefix index as an indented drawing, edges shown as text of up to `max_tokens`."""
        return await self._call(lambda: self._engine.draw_tree(self.tokenizer, max_tokens))

    async def flush_cache(self) -> int:
        """Drop every block that no request uses; return how many were dropped."""
        return await self._call(self._engine.flush_cache)

    async def attach_pool(self, settings: PoolSettings) -> None:
        """Use a pool from the next step on. Raises ConfigError or StorageError; then nothing has changed."""
        if self.pool is None:
            raise ConfigError("a pool needs the prefix cache, which is off")
        await self.pool.attach(settings, self._call)

    async def detach_pool(self) -> bool:
        """Write what is queued for the pool and let go of it; return whether there was one."""
        return self.pool is not None and await self.pool.detach(self._call)

    async def check(self) -> None:
        """Raise IntegrityError if blocks and their holders don't agree (slow; for tests and soaks)."""
        await self._call(self._engine.check)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, let running ones finish; abort the rest after `timeout_s`."""
        self._is_draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._subscriptions and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        finished = not self._subscriptions
        for request_id in list(self._subscriptions):
            await self.abort(request_id)
        return finished

    def close(self) -> None:
        """Stop the step loop; open requests end with ABORT. A second call does nothing."""
        if self._is_closed:
            return
        self._is_draining = self._is_closed = True
        self._commands.put(None)
        for thread in self._threads:
            thread.join()
        self._engine.close()

    def _subscribe(self, request: GenerationRequest) -> _Subscription:
        if self._is_closed or (self._is_draining and not request.is_continuation):
            raise ShuttingDown("the server is shutting down")
        self._engine.validate(request)
        num_waiting = sum(not s.has_started for s in self._subscriptions.values())
        if num_waiting >= self._max_waiting and not request.is_continuation:
            raise Overloaded(f"{num_waiting} requests are waiting already")
        if request.request_id in self._subscriptions:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        subscription = _Subscription(asyncio.get_running_loop())
        self._subscriptions[request.request_id] = subscription
        return subscription

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except StemmaError as error:
                future.set_exception(error)

        if self._is_closed:
            raise ShuttingDown("the engine is closed")
        self._commands.put(run)
        return await asyncio.wrap_future(future)

    # On the step thread:

    def _run_steps(self) -> None:
        while self._work_off_commands():
            try:
                news = self._engine.step()
            except Exception as error:
                # `Engine.step` handles what a model may throw; this is a bug of ours. Serve on.
                logger.exception("the step loop failed")
                news = self._engine.fail_all(describe_error(error))
            if news:
                self._news.put(news)
        self._news.put(None)

    def _work_off_commands(self) -> bool:
        """Run what the event loop asked for; wait for it if there is nothing else to do."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except Empty:
                return True
            if command is None:
                for request_id in list(self._subscriptions):
                    self._abort(request_id)
                return False
            command()

    def _add(self, request: GenerationRequest) -> None:
        try:
            self._engine.add(request)
        except StemmaError as error:
            self._deliver(request.request_id, error)

    def _abort(self, request_id: str) -> None:
        news = self._engine.abort(request_id)
        if news:
            self._news.put(news)

    # On the output thread:

    def _run_outputs(self) -> None:
        while (news := self._news.get()) is not None:
            outputs, stopped = self._processor.process(news)
            for one in stopped:
                self._commands.put(partial(self._engine.stop_sequence, one.request_id, one.index))
            for output in outputs:
                self._deliver(output.request_id, output)

    def _deliver(self, request_id: str, output: RequestOutput | StemmaError) -> None:
        subscription = self._subscriptions.get(request_id)
        if subscription is None:
            return
        subscription.has_started = True
        try:
            subscription.loop.call_soon_threadsafe(subscription.outputs.put_nowait, output)
        except RuntimeError:
            # The client's event loop is gone, and with it whoever waited.
            self._commands.put(lambda: self._abort(request_id))
