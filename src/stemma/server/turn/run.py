"""Run turns on the engine: budgets, errors, who watches, and the outputs of several prompts as one stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from stemma.config.settings import Settings
from stemma.engine.api import PromptProgress, RequestOutput, SequenceDelta
from stemma.engine.beam_search import run_beam_search
from stemma.engine.client import EngineClient
from stemma.errors import (
    ClientDisconnected,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
    StemmaError,
    TookTooLong,
)
from stemma.server.door.access import tenant_of
from stemma.server.door.caller import caller
from stemma.server.door.ledger import Admission, Reserved
from stemma.server.door.quotas import CacheQuotas
from stemma.server.lifecycle import Lifecycle
from stemma.server.observe.collected import Collected, Observers
from stemma.server.observe.metrics import ServerMetrics
from stemma.server.transport.incoming import unless_disconnected, until_disconnected
from stemma.server.turn.build import Turn
from stemma.server.turn.observers import Observe
from stemma.server.turn.outputs import Outputs, OutputStream, give_back
from stemma.server.turn.reports import Reports, TurnReports
from stemma.types import FinishReason

T = TypeVar("T")
_LOOK_S = 0.05
"""A stream's headers wait so long for what may still set the status, then until the engine has taken all."""


@dataclass(frozen=True, slots=True)
class TurnRunner:
    """Runs the turns of one server."""

    engine: EngineClient
    settings: Settings
    admission: Admission
    quotas: CacheQuotas
    lifecycle: Lifecycle
    metrics: ServerMetrics
    reports: Reports
    observers: list[Observe]
    """Parts of packages that begin with the server may add theirs."""

    async def start(self, request: Request, turns: Sequence[Turn]) -> OutputStream:
        """Run `turns` and return once the engine has taken them; raise if the client leaves before.

        What refuses them raises here as a rule, so that it sets the HTTP status; what comes later is raised
        where the stream is read.
        """
        await self.quotas.apply()
        reserved = self.reserve(request, turns)
        answers = _nothing_yet(turns, keeps_logprobs=False)
        stream = self._run(turns, answers)
        first = asyncio.ensure_future(_first(stream))
        quiet_s = self.settings.server.stream_comment_s
        outputs = OutputStream(first, stream, answers, reserved, quiet_s, partial(self._progress, turns))
        try:
            gone = asyncio.ensure_future(until_disconnected(request.receive))
            try:
                while not (first.done() or gone.done()):
                    await asyncio.wait({first, gone}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    if len(self._progress(turns)) == len(turns):
                        break
            finally:
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
            if first.done():
                first.result()
            elif not gone.cancelled():
                raise ClientDisconnected("the client closed the connection")
        except BaseException:
            await outputs.aclose()
            raise
        return outputs

    def _progress(self, turns: Sequence[Turn]) -> list[PromptProgress]:
        """Return how far the prompts have come that the engine has taken."""
        found = (self.engine.progress(one.request.request_id) for one in turns)
        return [self.reports.rounded(one) for one in found if one is not None]

    async def run_to_end(self, request: Request, turns: Sequence[Turn]) -> list[Collected]:
        """Run `turns` and return everything at once; abort them if the client leaves."""
        await self.quotas.apply()
        answers = _nothing_yet(turns, keeps_logprobs=True)
        reserved = self.reserve(request, turns)
        try:
            await unless_disconnected(request, _drain(self._run(turns, answers)))
        finally:
            give_back(reserved, answers)
        if not all(one.is_finished for one in answers):
            raise GenerationFailed("the engine ended a request without any output")
        _note_use(answers)
        return answers

    def _run(self, turns: Sequence[Turn], answers: Sequence[Collected]) -> Outputs:
        """Yield the outputs of all turns; `answers` are filled."""
        if len(turns) == 1:
            return self._run_one(turns[0], answers[0], 0)
        return self._run_several(turns, answers)

    async def _run_one(self, turn: Turn, answer: Collected, index: int) -> Outputs:
        """Yield `index` and the engine's outputs for one turn. Closing this early aborts it in the engine.

        Raises what the engine raises, and GenerationFailed if the engine reports an error.
        """
        if self.lifecycle.draining:
            raise ShuttingDown("the server is shutting down")
        request, engine = turn.request, self.engine
        observers = Observers(observe(turn) for observe in self.observers)
        reports = self.reports.of(turn)
        outcome = "aborted"
        stream = engine.generate(request) if request.beam is None else run_beam_search(engine, request)
        outputs = self._limited(stream)
        try:
            async for told in outputs:
                output = _without_answer(told) if turn.prewarms else told
                await self._take(output, answer, reports, observers)
                if output.finished:
                    outcome = "ok"
                    await observers.finished(answer)
                yield index, output
        except (InvalidRequest, Overloaded, ShuttingDown):
            outcome = "refused"
            raise
        except StemmaError:
            outcome = "error"
            raise
        finally:
            if not answer.is_finished:
                answer.num_held_tokens = engine.num_held_tokens(request.request_id)
            observers.ended(answer, outcome)
            await _close(outputs)
            await _close(stream)
            if outcome == "aborted":
                await engine.abort(request.request_id)

    async def _take(
        self,
        output: RequestOutput,
        answer: Collected,
        reports: TurnReports,
        observers: Observers,
    ) -> None:
        """Add an output to `answer`, and tell who watches. Raises the output's error."""
        has_begun, has_spoken = reports.has_begun, answer.num_generated_tokens > 0
        if output.cache is not reports.last:
            answer.exact, answer.cache = await reports.take(output.cache)
        answer.take(output)
        if not has_begun:
            observers.began(answer)
        if not has_spoken and answer.num_generated_tokens:
            observers.spoke(answer)
        output.raise_error()

    def _limited(self, stream: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        """Return `stream`, for as long as the operator lets a request take."""
        limit_s = self.settings.server.request_timeout_s
        if limit_s is None:
            return stream
        late = TookTooLong(f"the request took more than {limit_s:g} s")
        return until(asyncio.get_running_loop().time() + limit_s, stream, late)

    async def _run_several(self, turns: Sequence[Turn], answers: Sequence[Collected]) -> Outputs:
        """Yield the outputs of all turns as they come; the first error ends them all."""
        queue: asyncio.Queue[tuple[int, RequestOutput] | StemmaError | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._run_one(turns[index], answers[index], index)) as stream:
                    async for item in stream:
                        queue.put_nowait(item)
            except StemmaError as error:
                queue.put_nowait(error)
            finally:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(turns))]
        num_open = len(tasks)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, StemmaError):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
            for task in tasks:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def expect(self, num_sequences: int) -> None:
        """Count in the sequences that this request will ask for: a refusal comes before it is tokenized.

        Raises RateLimited, Overloaded or InvalidRequest.
        """
        if (reserved := caller().reserved) is not None:
            reserved.widen(num_sequences)

    def reserve(self, request: Request, turns: Sequence[Turn]) -> Reserved:
        """Take what `turns` and their answers need of every budget, until it is closed: nobody else does.

        Raises RateLimited, Overloaded or InvalidRequest.
        """
        one = caller()
        reserved = one.reserved or self.admission.enter(tenant_of(request))
        try:
            told = [each.asked.told for each in turns]
            reserved.reserve([each.request for each in turns], told, one.holding)
        except BaseException as error:
            reserved.close()
            if isinstance(error, StemmaError):
                self.metrics.requests.labels(turns[0].api, "refused").inc()
            raise
        finally:
            one.reserved = None
        return reserved


def _nothing_yet(turns: Sequence[Turn], *, keeps_logprobs: bool) -> list[Collected]:
    lengths = (len(one.request.prompt_token_ids) for one in turns)
    return [Collected.nothing(length, keeps_logprobs=keeps_logprobs) for length in lengths]


def _note_use(answers: Sequence[Collected]) -> None:
    used = caller().used
    used.num_prompt_tokens += sum(one.cache.num_prompt_tokens for one in answers)
    used.num_cached_tokens += sum(one.cache.num_cached_tokens for one in answers)
    used.num_generated_tokens += sum(one.num_generated_tokens for one in answers)


async def _first(stream: Outputs) -> tuple[int, RequestOutput]:
    async for item in stream:
        return item
    raise GenerationFailed("the engine ended a request without any output")


def _without_answer(output: RequestOutput) -> RequestOutput:
    """Return an output of a prompt that is computed for later: the one token that was drawn is nobody's."""
    deltas = tuple(
        SequenceDelta(
            one.index,
            (),
            "",
            finish_reason=FinishReason.STOP
            if one.finish_reason is FinishReason.LENGTH
            else one.finish_reason,
        )
        for one in output.deltas
    )
    return replace(output, deltas=deltas, num_generated_tokens=0)


async def _drain(stream: Outputs) -> None:
    async with aclosing(stream):
        async for _ in stream:
            pass


async def until(
    deadline: float | None, stream: AsyncIterator[T], late: StemmaError
) -> AsyncGenerator[T, None]:
    """Yield what `stream` yields; raise `late` at `deadline`, on the event loop's clock."""
    while True:
        try:
            async with asyncio.timeout_at(deadline):  # never around the `yield`: another task may close this
                output = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise late from error
        yield output


async def _close(stream: AsyncIterator[RequestOutput]) -> None:
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


def new_request_id(prefix: str) -> str:
    """Return a fresh id, e.g. ``chatcmpl-4f1c...``."""
    return f"{prefix}-{uuid.uuid4().hex}"
