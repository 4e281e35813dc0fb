"""The engine behind asyncio: an `EngineClient` whose step loop has a thread of its own.

Three parties, joined by queues::

    event loop --commands--> step thread --news--> output thread --outputs--> event loop

The step thread loads the model and owns the `Engine`; it runs the commands between two steps. (OpenMP
keeps a pool of threads for each thread that starts parallel work, and with two pools every barrier sleeps
instead of spinning: so one thread does both.) The output thread turns tokens into text, so that
detokenization costs neither the step loop nor the event loop. Nothing the event loop calls here blocks.

Errors: a step or a command that fails ends all requests with an error; if the cache is consistent afterwards,
the engine serves on. Anything else that a thread doesn't handle reaches the `EngineSupervisor`: open requests
and calls get `EngineFailed`, and so do new ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from typing_extensions import override

from stemma.budgets import TENANT_SHARE, Budget
from stemma.config.settings import EngineSettings, PoolSettings
from stemma.engine.api import (
    EngineLoad,
    EngineStats,
    GenerationRequest,
    Prepared,
    PromptProgress,
    RequestOutput,
)
from stemma.engine.build import EngineParts, build_engine
from stemma.engine.client import EngineClient
from stemma.engine.core.engine import Engine, describe_error
from stemma.engine.core.request import SequenceNews
from stemma.engine.core.validation import CheckedRequest
from stemma.engine.mailbox import Mailbox
from stemma.engine.operator.cache_control import CacheControl
from stemma.engine.output.joining import NewsQueue
from stemma.engine.output.output import OutputProcessor
from stemma.engine.sampling.grammar import Grammar
from stemma.engine.supervisor import EngineSupervisor, ThreadFailure
from stemma.errors import (
    ConfigError,
    DeviceLost,
    EngineFailed,
    GenerationFailed,
    IntegrityError,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
    StemmaError,
    TookTooLong,
)
from stemma.model.files.progress import Progress
from stemma.model.load.plan import LoadPlan
from stemma.native.cores import usable_cores
from stemma.prefix.eviction.policy import Conclusion
from stemma.prefix.keys import Namespace
from stemma.supervision import Supervisor
from stemma.types import TokenArray
from stemma.workers import WorkerThreads

logger = logging.getLogger(__name__)
T = TypeVar("T")
_DRAIN_POLL_S = 0.02
_REST_S = 0.05
"""Without work for so long, the step thread does what later steps need: a client may be about to go on."""
JOINING_INTERVAL_S = 1 / 15
"""15 deliveries a second at least: faster than anybody reads, and steps of 33 ms or less are joined."""
GRAMMAR_TIMEOUT_S = 10.0
"""Time limit of compiling a grammar, from when that begins."""
_GRAMMAR_THREADS = 2
MAX_WAITING_GRAMMARS = 256
"""Requests whose grammar waits to be compiled."""


@dataclass(slots=True)
class _Subscription:
    """Where the outputs of one request go."""

    request: GenerationRequest
    outputs: Mailbox[RequestOutput | StemmaError]
    has_started: bool = False


class AsyncEngine(EngineClient):
    """Serves requests from an event loop. Start it once the loop's process is set up; `close` it once."""

    def __init__(
        self,
        build: Callable[[Supervisor], EngineParts],
        *,
        max_waiting: int,
        stream_interval_s: float | None = None,
    ) -> None:
        """Run `build` on the step thread, wait for it and start; raises what it raises.

        `stream_interval_s`: how long tokens may be held to leave together; None: see `joining_interval_s`.
        """
        self._max_waiting = max_waiting
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._arrivals: deque[CheckedRequest] = deque()
        """Requests for the step thread, in order, until a command fetches them."""
        self._news = NewsQueue()
        self._stream_interval_s = stream_interval_s
        self._subscriptions: dict[str, _Subscription] = {}
        self._calls: set[Future[Any]] = set()
        self._over: StemmaError | None = None
        """Why nothing is served any more; what is queued after this was set is refused with it."""
        self._is_draining = False
        self._is_closed = False
        self._is_paused = False
        """Set and read on the step thread."""
        self.supervisor: EngineSupervisor = EngineSupervisor(self._on_failure)
        built: Future[EngineParts] = Future()
        self.supervisor.start("stemma-steps", partial(self._own_engine, build, built))
        try:
            self.parts = built.result()
        except BaseException:
            if built.done():
                self.supervisor.close()
            raise
        engine = self.parts.engine
        self.model_name = self.parts.model_name
        self.also_named = self.parts.also_named
        self.max_model_len = engine.limits.max_tokens
        self.tokenizer = self.parts.tokenizer
        self.adapters = self.parts.adapters
        self.default_sampling: Mapping[str, float | int] = self.parts.model.default_sampling
        self.abilities = self.parts.model.abilities
        self.images = self.parts.images
        self.eos_token_ids = engine.limits.eos_token_ids
        self.pool = self.parts.pool
        self.own_directory = self.parts.own_directory
        self.key_space = self.parts.key_space
        self.cache_control = CacheControl(
            engine, self.parts.device, self.parts.key_space, self._call, num_ranks=self.parts.num_ranks
        )
        self._engine: Engine = engine
        self._processor = OutputProcessor(self.parts.tokenizer)
        waiting = Budget(
            "grammar_queue",
            "grammars that wait to be compiled",
            MAX_WAITING_GRAMMARS,
            int(TENANT_SHARE * MAX_WAITING_GRAMMARS),
        )
        self._compilers = WorkerThreads(_GRAMMAR_THREADS, "stemma-grammars", self.supervisor, waiting)
        self.supervisor.start("stemma-outputs", self._run_outputs)

    @classmethod
    def from_settings(
        cls, settings: EngineSettings, progress: Progress | None = None, plan: LoadPlan | None = None
    ) -> AsyncEngine:
        """Load the checkpoint and start. Raises ModelError, UnsupportedModel or ConfigError.

        `progress` is called on the step thread. `plan`: what was begun of the load before.
        """
        interval_ms = settings.scheduler.stream_interval_ms
        return cls(
            lambda supervisor: build_engine(settings, progress, supervisor, plan),
            max_waiting=settings.scheduler.max_waiting,
            stream_interval_s=None if interval_ms is None else interval_ms / 1e3,
        )

    @property
    @override
    def failure(self) -> str | None:
        failure = self.supervisor.failure
        return None if failure is None else failure.reason

    @property
    @override
    def load(self) -> EngineLoad:
        load = self._engine.load()
        return replace(load, num_waiting=load.num_waiting + len(self._arrivals))

    @property
    @override
    def budgets(self) -> tuple[Budget, ...]:
        found = (self._compilers.budget, self._engine.grammar_budget)
        return tuple(one for one in found if one is not None)

    @override
    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        checked, grammar = await self._checked(request)
        subscription = self._subscribe(request, Mailbox(asyncio.get_running_loop()))
        self._arrivals.append(checked)
        # Only in the loop's next turn: requests of this one, such as the beams of a round, begin in one step.
        subscription.outputs.loop.call_soon(self._commands.put, self._add_arrivals)
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
            del grammar  # held until here, so that the step loop finds it compiled
            del self._subscriptions[request.request_id]
            if not is_finished:
                self._commands.put(lambda: self._abort(request.request_id))

    @override
    async def generate_all(self, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
        all_checked = [await self._checked(request) for request in requests]
        outputs: Mailbox[RequestOutput | StemmaError] = Mailbox(asyncio.get_running_loop())
        last: dict[str, RequestOutput] = {}
        asked: list[str] = []
        try:
            for request, _ in all_checked:
                self._subscribe(request, outputs)
                asked.append(request.request_id)
                self._arrivals.append(request)
            self._commands.put(self._add_arrivals)
            while len(last) < len(asked):
                output = await outputs.get()
                if isinstance(output, StemmaError):
                    raise output
                output.raise_error()
                if output.finished:
                    last[output.request_id] = output
            if self.pool is not None:
                await self.pool.settle(self._call)
            return [last[request_id] for request_id in asked]
        finally:
            del all_checked  # with the grammars, held until here, as in `generate`
            for request_id in asked:
                del self._subscriptions[request_id]
            if left := [request_id for request_id in asked if request_id not in last]:
                self._commands.put(partial(self._abort_all, left))

    async def _checked(self, request: GenerationRequest) -> tuple[CheckedRequest, Sequence[Grammar]]:
        """Check a request; compile its grammars, if it has any, off the event loop and off the step loop.

        The step loop finds them as long as the caller holds them.
        """
        self._require_serving(request)
        if request.params.grammar is None and request.params.calls is None:
            return self._engine.checked(request), ()
        try:
            return await self._compilers.run(
                partial(self._engine.compiled, request),
                limit_s=GRAMMAR_TIMEOUT_S,
                what="compiling the grammar",
                owner=request.namespace.owner,
            )
        except TookTooLong:
            raise InvalidRequest("the grammar takes too long to compile", param="grammar") from None

    @override
    async def prepare(self, request: GenerationRequest, max_tokens: int) -> Prepared:
        self._require_serving(request)
        checked = self._engine.checked(request)
        future: Future[Prepared] = Future()
        self._calls.add(future)
        try:
            self._commands.put(partial(self._prepare, checked, max_tokens, future))
            if self._over is not None:
                _settle(future, self._over)
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._commands.put(self._engine.end_preparation)
            raise
        finally:
            self._calls.discard(future)

    @override
    async def abort(self, request_id: str) -> None:
        self._commands.put(lambda: self._abort(request_id))

    @override
    def conclude(self, namespace: Namespace, tokens: TokenArray, conclusion: Conclusion) -> None:
        self._commands.put(lambda: self._engine.conclude(namespace, tokens, conclusion))

    @override
    def num_held_tokens(self, request_id: str) -> int:
        return self._news.num_held(request_id)

    @override
    def progress(self, request_id: str) -> PromptProgress | None:
        subscription = self._subscriptions.get(request_id)
        return None if subscription is None else self._engine.progress(subscription.request)

    @override
    async def stats(self) -> EngineStats:
        return await self._call(self._engine.stats)

    @override
    async def draw_tree(self, max_tokens: int = 24) -> str:
        return await self._call(lambda: self._engine.draw_tree(self.tokenizer, max_tokens))

    @override
    async def attach_pool(self, settings: PoolSettings) -> None:
        if self.pool is None:
            raise ConfigError("there can be no pool: the prefix cache is off")
        await self.pool.attach(settings, self._call)

    @override
    async def detach_pool(self) -> bool:
        return self.pool is not None and await self.pool.detach(self._call)

    async def check(self) -> None:
        """Raise IntegrityError if blocks and their holders don't agree (slow; for tests and soaks)."""
        await self._call(self._engine.check)

    @override
    async def pause(self) -> None:
        await self._call(lambda: self._set_paused(True))

    @override
    async def resume(self) -> None:
        await self._call(lambda: self._set_paused(False))

    @override
    async def drain(self, timeout_s: float) -> bool:
        self._is_draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._subscriptions and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        finished = not self._subscriptions
        for request_id in list(self._subscriptions):
            await self.abort(request_id)
        return finished

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_draining = self._is_closed = True
        self._commands.put(None)
        self._compilers.close()
        self.supervisor.close()
        self._engine.close()

    def _subscribe(
        self, request: GenerationRequest, outputs: Mailbox[RequestOutput | StemmaError]
    ) -> _Subscription:
        self._require_serving(request)
        num_waiting = sum(not s.has_started for s in self._subscriptions.values())
        if num_waiting >= self._max_waiting and not request.is_continuation:
            raise Overloaded(f"{num_waiting} requests are waiting already")
        if request.request_id in self._subscriptions:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        subscription = _Subscription(request, outputs)
        self._subscriptions[request.request_id] = subscription
        if self._over is not None:  # set meanwhile, perhaps before this subscription could be seen
            del self._subscriptions[request.request_id]
            raise self._over
        return subscription

    def _require_serving(self, request: GenerationRequest) -> None:
        if self._over is not None:
            raise self._over
        if self._is_closed or (self._is_draining and not request.is_continuation):
            raise ShuttingDown("the server is shutting down")

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps. If the caller is cancelled before it began, it never runs."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                if not future.set_running_or_notify_cancel():
                    return
            except InvalidStateError:
                return  # ended by `_stop_serving`
            try:
                result = function()
            except StemmaError as error:
                _settle(future, error)
            except Exception as error:
                _settle(future, error)
                raise
            else:
                _settle(future, result)

        self._calls.add(future)
        try:
            self._commands.put(run)
            if self._over is not None:
                _settle(future, self._over)
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    def _on_failure(self, failure: ThreadFailure) -> None:
        """A thread failed: nothing is served any more."""
        self._stop_serving(EngineFailed(f"the engine stopped: {failure.reason}"))
        self._commands.put(None)
        self._news.close()

    def _stop_serving(self, error: StemmaError) -> None:
        """End open requests and calls, and all that come later, with `error`."""
        self._over = error
        for request_id in self._subscriptions.copy():
            self._deliver([(request_id, error)])
        for future in self._calls.copy():
            _settle(future, error)

    # On the step thread:

    def _own_engine(self, build: Callable[[Supervisor], EngineParts], built: Future[EngineParts]) -> None:
        """Load the engine, then run its steps until told to stop."""
        try:
            parts = build(self.supervisor)
        except BaseException as error:  # noqa: BLE001 - whoever started us gets it
            built.set_exception(error)
            return
        interval_s = self._stream_interval_s
        self._news.interval_s = joining_interval_s(parts) if interval_s is None else interval_s
        self._engine = parts.engine
        # The output thread gets the news when the next step makes its native call. Threads that wrote them
        # out while this one still prepares the step would hold up all cores, since one at a time runs Python.
        self._engine.tell_launches(self._news.begin_step)
        built.set_result(parts)
        while self._work_off_commands():
            self._news.end_step(self._step())
        self._news.pass_on()
        self._news.close()

    def _step(self) -> list[SequenceNews]:
        """Run a step; if it fails, end all requests. Raises IntegrityError if some are left then.

        Raises DeviceLost: that ends the engine, and each request by the supervisor.
        """
        try:
            return self._engine.step()
        except DeviceLost:
            raise
        except Exception as error:
            # `Engine.step` handles what a model may throw; this is a bug of ours. Serve on if that is safe.
            logger.exception("the step loop failed")
            news = self._engine.fail_all(describe_error(error))
            if self._engine.has_work:
                raise IntegrityError("requests are left although all were ended") from error
            self._engine.check()
            return news

    def _work_off_commands(self) -> bool:
        """Run what the event loop asked for; wait for it if there is nothing else to do."""
        rested_at: float | None = time.monotonic() + _REST_S  # None: nothing is left to do in idle time
        while True:
            is_idle = self._is_paused or not self._engine.has_work
            if is_idle:
                self._news.pass_on()
            wait_s = None if rested_at is None else max(0.0, rested_at - time.monotonic())
            try:
                command = self._commands.get(block=is_idle, timeout=wait_s)
            except Empty:
                if not is_idle:
                    return True
                again_s = self._engine.use_idle_time()
                rested_at = None if again_s is None else time.monotonic() + again_s
                continue
            # No later than it is: whoever asks for counts all the time mustn't put it off.
            next_rest_at = time.monotonic() + _REST_S
            rested_at = next_rest_at if rested_at is None else min(rested_at, next_rest_at)
            self._news.pass_on()
            if command is None:
                self._abort_all(list(self._subscriptions.copy()))
                self._engine.end_preparation()
                return False
            try:
                command()
            except Exception:
                # The caller has the error. Serve on if the cache is consistent.
                logger.exception("a command to the step loop failed")
                self._engine.check()

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def _prepare(self, request: CheckedRequest, max_tokens: int, future: Future[Prepared]) -> None:
        self._add_arrivals()  # one that came before goes first
        try:
            self._engine.prepare(request, max_tokens, partial(_settle, future))
        except Exception as error:
            _settle(future, error)
            raise

    def _add_arrivals(self) -> None:
        while self._arrivals:
            self._add(self._arrivals.popleft())

    def _add(self, request: CheckedRequest) -> None:
        try:
            self._engine.add(request)
        except StemmaError as error:
            self._deliver([(request.request_id, error)])
        except Exception as error:
            self._deliver([(request.request_id, GenerationFailed(describe_error(error)))])
            self._engine.abort(request.request_id)
            raise

    def _abort_all(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        self._add_arrivals()  # it may be among them
        self._news.put(self._engine.abort(request_id))

    # On the output thread:

    def _run_outputs(self) -> None:
        while (news := self._news.get()) is not None:
            outputs, stopped = self._processor.process(news)
            for one in stopped:
                self._commands.put(partial(self._engine.stop_sequence, one.request_id, one.index))
            self._deliver([(output.request_id, output) for output in outputs])
            for output in outputs:
                if output.error is not None:
                    self._commands.put(partial(self._abort, output.request_id))
        self._stop_serving(self._over or ShuttingDown("the engine is closed"))

    def _deliver(self, outputs: Sequence[tuple[str, RequestOutput | StemmaError]]) -> None:
        """Pass outputs to their requests; those of a step wake each event loop once."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[_Subscription, RequestOutput | StemmaError]]] = {}
        for request_id, output in outputs:
            subscription = self._subscriptions.get(request_id)
            if subscription is not None:
                subscription.has_started = True
                loops.setdefault(subscription.outputs.loop, []).append((subscription, output))
        for loop, group in loops.items():
            try:
                loop.call_soon_threadsafe(_put_all, group)
            except RuntimeError:
                # The clients' event loop is closed, so nobody reads the outputs.
                for request_id, _ in outputs:
                    subscription = self._subscriptions.get(request_id)
                    if subscription is not None and subscription.outputs.loop is loop:
                        self._commands.put(partial(self._abort, request_id))


def joining_interval_s(parts: EngineParts) -> float:
    """Return how long tokens are held where nothing is set; on the step thread.

    Only where the threads of the model's processes fill all cores: elsewhere the event loop holds up no step.
    """
    num_threads = torch.get_num_threads() * parts.num_ranks
    is_full = parts.model.device.type == "cpu" and num_threads >= usable_cores()
    return JOINING_INTERVAL_S if is_full else 0.0


def _put_all(group: Sequence[tuple[_Subscription, RequestOutput | StemmaError]]) -> None:
    for subscription, output in group:
        subscription.outputs.put(output)


def _settle(future: Future[Any], outcome: object) -> None:
    """Set a future's result, or its exception if `outcome` is one; do nothing if it has ended already."""
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass  # cancelled, or settled by the other side
