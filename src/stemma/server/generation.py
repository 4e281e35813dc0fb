"""Run requests on the engine: metrics, errors, and the outputs of several prompts as one stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from stemma.config.settings import Settings
from stemma.engine.api import CacheReport, DraftCount, GenerationRequest, RequestOutput
from stemma.engine.beam_search import run_beam_search
from stemma.engine.client import EngineClient
from stemma.engine.pooling import Vector
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.errors import (
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
    StemmaError,
    TookTooLong,
    Unauthorized,
)
from stemma.server.access import Access, tenant_of
from stemma.server.admission.ledger import Admission, Reserved
from stemma.server.history.answers import WrittenAnswers
from stemma.server.history.concluding import Concluder
from stemma.server.history.following import Follower
from stemma.server.history.preparing import TurnPreparer
from stemma.server.lifecycle import Lifecycle
from stemma.server.observe.explain import is_asked
from stemma.server.observe.explanations import Explanation
from stemma.server.observe.instruments import Instruments
from stemma.server.requests.limits import cap_output
from stemma.server.requests.sessions import with_session
from stemma.server.tenants.namespace import tenant_namespace
from stemma.server.tenants.published import PublishedPrefixes
from stemma.server.tenants.quotas import CacheQuotas
from stemma.server.transport.disconnect import unless_disconnected
from stemma.types import FinishReason, Tier

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestRunner:
    """Runs the requests of one server."""

    engine: EngineClient
    settings: Settings
    access: Access
    admission: Admission
    published: PublishedPrefixes
    quotas: CacheQuotas
    instruments: Instruments
    lifecycle: Lifecycle
    written: WrittenAnswers | None
    """None: exact history is off."""
    turns: TurnPreparer

    async def start(self, request: Request, requests: Sequence[GenerationRequest], api: str) -> OutputStream:
        """Run `requests` and return once the first output is there; raise if the client leaves before."""
        reserved = self._reserve(request, requests, api)
        stream = self._run_as_asked(request, requests, api, reserved)

        async def first() -> tuple[int, RequestOutput]:
            async for item in stream:
                return item
            raise GenerationFailed("the engine ended a request without any output")

        try:
            return OutputStream(await unless_disconnected(request, first()), stream, reserved)
        except BaseException:
            reserved.close()
            raise

    async def run_to_end(
        self, request: Request, requests: Sequence[GenerationRequest], api: str
    ) -> list[Collected]:
        """Run `requests` and return everything at once; abort them if the client leaves."""
        with closing(self._reserve(request, requests, api)) as reserved:
            stream = self._run_as_asked(request, requests, api, reserved)
            return await unless_disconnected(request, _collect(stream, len(requests)))

    async def run_one(
        self, request: GenerationRequest, api: str, index: int = 0
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield `index` and the engine's outputs for one request. Closing this early aborts it in the engine.

        A whole answer is in the usage ledger before its last output is yielded.
        Raises what the engine raises, and GenerationFailed if the engine reports an error.
        """
        if self.lifecycle.draining:
            raise ShuttingDown("the server is shutting down")
        request = cap_output(self.settings.requests, request)
        watch = self.instruments.watches.watch(request, api)
        entry = self.instruments.ledger.entry(request, api)
        outcome = "aborted"
        is_noted = False
        engine = self.engine
        stream = engine.generate(request) if request.beam is None else run_beam_search(engine, request)
        limit_s = self.settings.server.request_timeout_s
        outputs = stream
        if limit_s is not None:
            late = TookTooLong(f"the request took more than {limit_s:g} s")
            outputs = until(asyncio.get_running_loop().time() + limit_s, stream, late)
        rounds = self.settings.server.report_granularity != "token"
        num_prepared = partial(self.turns.num_used, request)
        follower = Follower(self.written, engine.tokenizer, engine.eos_token_ids, request, num_prepared)
        turn = self.turns.open(request)
        concluder = Concluder(engine, request)
        try:
            async for told in outputs:
                exact = follower.told(told)
                turn.seen(exact)
                concluder.seen(exact)
                output = rounded_to_blocks(self.settings, exact) if rounds else exact
                if not is_noted:
                    is_noted = True
                    self.instruments.explanations.add(Explanation.of(request, exact.cache))
                    self.instruments.divergences.add(time.monotonic(), request, exact.cache)
                watch.seen(output)
                entry.seen(exact)
                output.raise_error()
                if output.finished:
                    outcome = "ok"
                    await entry.committed()
                yield index, output
        except (InvalidRequest, Overloaded, ShuttingDown):
            outcome = "refused"
            raise
        except StemmaError:
            outcome = "error"
            raise
        finally:
            self.turns.close(turn)
            watch.done(outcome)
            entry.ended(outcome)
            await _close(outputs)
            await _close(stream)
            if outcome == "aborted":
                await self.engine.abort(request.request_id)

    def run_all(
        self, requests: Sequence[GenerationRequest], api: str
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (prompt index, output) of all requests as they come; the first error ends them all."""
        return self.run_one(requests[0], api) if len(requests) == 1 else self._run_several(requests, api)

    async def _run_several(
        self, requests: Sequence[GenerationRequest], api: str
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        queue: asyncio.Queue[tuple[int, RequestOutput] | StemmaError | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async with aclosing(self.run_one(requests[index], api, index)) as stream:
                    async for item in stream:
                        queue.put_nowait(item)
            except StemmaError as error:
                queue.put_nowait(error)
            finally:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(requests))]
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

    def _run_as_asked(
        self,
        request: Request,
        requests: Sequence[GenerationRequest],
        api: str,
        reserved: Reserved,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """`run_all` for whoever asks. Every API passes here: none forgets tenants or published prefixes."""
        requests = with_session(request, requests)
        if self.access.keys is not None or is_asked(request):
            return self._run_as_tenant(request, requests, api, reserved)
        return self.run_all(self._located(requests), api)

    def _located(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        return [
            replace(one, namespace=self.published.located(one.namespace, one.prompt_token_ids))
            for one in requests
        ]

    async def _run_as_tenant(
        self,
        request: Request,
        requests: Sequence[GenerationRequest],
        api: str,
        reserved: Reserved,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """`run_all` in the namespace of the tenant who asks, and explained if asked."""
        keys, tenant = self.access.keys, tenant_of(request)
        num_generated: dict[int, int] = {}
        wants_why = is_asked(request)
        why: dict[int, CacheReport] = {}
        if keys is not None:
            assert tenant is not None
            await self.quotas.apply()
            requests = [
                replace(one, namespace=tenant_namespace(keys.secret, tenant.name, one.namespace))
                for one in requests
            ]
        requests = self._located(requests)
        async with aclosing(self.run_all(requests, api)) as stream:
            try:
                async for index, output in stream:
                    num_generated[index] = output.num_generated_tokens
                    if wants_why:
                        if index not in why:
                            mine = requests[index]
                            first = await self.instruments.explainer.explained(
                                mine, output, quotes_cached=tenant is not None
                            )
                            why[index] = first.cache
                        output = replace(output, cache=why[index])
                    yield index, output
            finally:  # before those that are cut off are aborted
                for index in num_generated:
                    num_generated[index] += self.engine.num_held_tokens(requests[index].request_id)
                reserved.num_generated = sum(num_generated.values())

    def _reserve(self, request: Request, requests: Sequence[GenerationRequest], api: str) -> Reserved:
        """Take what `requests` need of every budget. Raises RateLimited, Overloaded or InvalidRequest."""
        tenant = tenant_of(request)
        if tenant is None and self.access.keys is not None:
            raise Unauthorized("this path takes no request without an API key")
        try:
            return self.admission.reserve(tenant, requests)
        except StemmaError:
            self.instruments.metrics.requests.labels(api, "refused").inc()
            raise

    @contextmanager
    def admitted(self, request: Request) -> Iterator[None]:
        """Count work that generates nothing (tokenizing) as one request of the tenant. Raises RateLimited."""
        with closing(self.admission.reserve_call(tenant_of(request))):
            yield


class OutputStream:
    """`run_all` after its first output, so that a refusal before it still sets the HTTP status.

    `aclose` aborts what is still running; it is safe to call at any time, also before the first read.
    """

    def __init__(
        self,
        first: tuple[int, RequestOutput],
        rest: AsyncGenerator[tuple[int, RequestOutput], None],
        reserved: Reserved,
    ) -> None:
        """`reserved` is returned at the end."""
        self.first = first
        self._reserved = reserved
        self._is_first_read = False
        self._rest = rest

    def __aiter__(self) -> OutputStream:
        return self

    def __anext__(self) -> Awaitable[tuple[int, RequestOutput]]:
        if self._is_first_read:
            return anext(self._rest)
        self._is_first_read = True
        return self._first()

    async def _first(self) -> tuple[int, RequestOutput]:
        return self.first

    async def aclose(self) -> None:
        """Abort what is still running."""
        try:
            await self._rest.aclose()
        finally:
            self._reserved.close()


@dataclass(slots=True)
class CollectedSequence:
    """One whole sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Collected:
    """All that the engine said about one prompt."""

    cache: CacheReport
    sequences: list[CollectedSequence]
    num_generated_tokens: int = 0
    queue_wait_s: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None
    pooled: Vector | None = None
    """The vector of a prompt that was asked for instead of an answer."""
    drafts: Mapping[str, DraftCount] = field(default_factory=dict)


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


def rounded_to_blocks(settings: Settings, output: RequestOutput) -> RequestOutput:
    """Return `output` with cached tokens rounded down to whole blocks."""
    size = settings.engine.cache.block_size
    cache = output.cache
    whole = cache.num_cached_tokens // size * size
    by_tier: dict[Tier, int] = {}
    for tier, count in sorted(cache.cached_by_tier.items(), key=lambda item: item[1], reverse=True):
        by_tier[tier] = min(count // size * size, whole - sum(by_tier.values()))
    rounded = CacheReport(
        cache.num_prompt_tokens,
        by_tier,
        cache.miss_reason,
        num_public_tokens=min(cache.num_public_tokens, whole),
        num_exact_history_tokens=cache.num_exact_history_tokens // size * size,
        num_prepared_tokens=cache.num_prepared_tokens // size * size,
    )
    return replace(output, cache=rounded)


async def _close(stream: AsyncIterator[RequestOutput]) -> None:
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


async def _collect(
    stream: AsyncGenerator[tuple[int, RequestOutput], None], num_prompts: int
) -> list[Collected]:
    results: dict[int, Collected] = {}
    parts: dict[tuple[int, int], list[str]] = {}
    async with aclosing(stream):
        async for index, output in stream:
            result = results.setdefault(index, Collected(output.cache, []))
            result.cache = output.cache
            result.num_generated_tokens = output.num_generated_tokens
            result.queue_wait_s = output.queue_wait_s
            result.prompt_logprobs = output.prompt_logprobs
            result.pooled = output.pooled
            result.drafts = output.drafts
            for delta in output.deltas:
                while len(result.sequences) <= delta.index:
                    result.sequences.append(CollectedSequence())
                sequence = result.sequences[delta.index]
                parts.setdefault((index, delta.index), []).append(delta.text)
                sequence.token_ids.extend(delta.token_ids)
                sequence.logprobs.extend(delta.logprobs or ())
                if delta.finish_reason is not None:
                    sequence.finish_reason = delta.finish_reason
                    sequence.stop_reason = delta.stop_reason
    for (index, sequence_index), texts in parts.items():
        results[index].sequences[sequence_index].text = "".join(texts)
    if len(results) < num_prompts:
        raise GenerationFailed("the engine ended a request without any output")
    return [results[index] for index in range(num_prompts)]


def new_request_id(prefix: str) -> str:
    """Return a fresh id, e.g. ``chatcmpl-4f1c...``."""
    return f"{prefix}-{uuid.uuid4().hex}"
