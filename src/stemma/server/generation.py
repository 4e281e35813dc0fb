"""Run requests on the engine: metrics, errors, and the outputs of several prompts as one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field, replace

from starlette.requests import Request

from stemma.config.settings import Settings
from stemma.engine.api import CacheReport, DraftCount, GenerationRequest, RequestOutput
from stemma.engine.beam_search import run_beam_search
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
from stemma.server.access import tenant_of
from stemma.server.admission.ledger import Reserved
from stemma.server.context import ServerContext
from stemma.server.observe.explain import is_asked
from stemma.server.observe.explanations import Explanation
from stemma.server.requests.limits import cap_output
from stemma.server.tenants.namespace import tenant_namespace
from stemma.server.transport.disconnect import unless_disconnected
from stemma.types import FinishReason, Tier


async def run_one(
    context: ServerContext, request: GenerationRequest, api: str, index: int = 0
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield `index` and the engine's outputs for one request. Closing this early aborts it in the engine.

    A whole answer is in the usage ledger before its last output is yielded.
    Raises what the engine raises, and GenerationFailed if the engine reports an error.
    """
    if context.draining:
        raise ShuttingDown("the server is shutting down")
    request = cap_output(context.settings.requests, request)
    watch = context.watches.watch(request, api)
    entry = context.ledger.entry(request, api)
    outcome = "aborted"
    is_noted = False
    engine = context.engine
    stream = engine.generate(request) if request.beam is None else run_beam_search(engine, request)
    limit_s = context.settings.server.request_timeout_s
    outputs = stream if limit_s is None else within(stream, limit_s)
    rounds = context.settings.server.report_granularity != "token"
    try:
        async for exact in outputs:
            output = rounded_to_blocks(context.settings, exact) if rounds else exact
            if not is_noted:
                is_noted = True
                context.explanations.add(Explanation.of(request, exact.cache))
                context.divergences.add(time.monotonic(), request, exact.cache)
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
        watch.done(outcome)
        entry.ended(outcome)
        await _close(outputs)
        await _close(stream)
        if outcome == "aborted":
            await context.engine.abort(request.request_id)


async def within(stream: AsyncIterator[RequestOutput], limit_s: float) -> AsyncGenerator[RequestOutput, None]:
    """Yield what `stream` yields; raise TookTooLong after `limit_s`."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                output = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise TookTooLong(f"the request took more than {limit_s:g} s") from error
        yield output


def rounded_to_blocks(settings: Settings, output: RequestOutput) -> RequestOutput:
    """Return `output` with cached tokens rounded down to whole blocks."""
    size = settings.engine.cache.block_size
    cache = output.cache
    whole = cache.num_cached_tokens // size * size
    by_tier: dict[Tier, int] = {}
    for tier, count in sorted(cache.cached_by_tier.items(), key=lambda item: item[1], reverse=True):
        by_tier[tier] = min(count // size * size, whole - sum(by_tier.values()))
    num_public = min(cache.num_public_tokens, whole)
    rounded = CacheReport(cache.num_prompt_tokens, by_tier, cache.miss_reason, num_public_tokens=num_public)
    return replace(output, cache=rounded)


async def _close(stream: AsyncIterator[RequestOutput]) -> None:
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


def run_all(
    context: ServerContext, requests: Sequence[GenerationRequest], api: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (prompt index, output) of all requests as they come; the first error ends them all."""
    return run_one(context, requests[0], api) if len(requests) == 1 else _run_several(context, requests, api)


async def _run_several(
    context: ServerContext, requests: Sequence[GenerationRequest], api: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    queue: asyncio.Queue[tuple[int, RequestOutput] | StemmaError | None] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async with aclosing(run_one(context, requests[index], api, index)) as stream:
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
    context: ServerContext,
    request: Request,
    requests: Sequence[GenerationRequest],
    api: str,
    reserved: Reserved,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """`run_all` for whoever asks. Every API passes here, so none can forget tenants or published prefixes."""
    if context.access.keys is not None or is_asked(request):
        return _run_as_tenant(context, request, requests, api, reserved)
    return run_all(context, _located(context, requests), api)


def _located(context: ServerContext, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    return [
        replace(one, namespace=context.published.located(one.namespace, one.prompt_token_ids))
        for one in requests
    ]


async def _run_as_tenant(
    context: ServerContext,
    request: Request,
    requests: Sequence[GenerationRequest],
    api: str,
    reserved: Reserved,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """`run_all` in the namespace of the tenant who asks, and explained if asked."""
    keys, tenant = context.access.keys, tenant_of(request)
    num_generated: dict[int, int] = {}
    wants_why = is_asked(request)
    why: dict[int, CacheReport] = {}
    if keys is not None:
        assert tenant is not None
        await context.apply_quotas()
        requests = [
            replace(one, namespace=tenant_namespace(keys.secret, tenant.name, one.namespace))
            for one in requests
        ]
    requests = _located(context, requests)
    async with aclosing(run_all(context, requests, api)) as stream:
        try:
            async for index, output in stream:
                num_generated[index] = output.num_generated_tokens
                if wants_why:
                    if index not in why:
                        mine = requests[index]
                        first = await context.explainer.explained(
                            mine, output, quotes_cached=tenant is not None
                        )
                        why[index] = first.cache
                    output = replace(output, cache=why[index])
                yield index, output
        finally:  # before those that are cut off are aborted
            for index in num_generated:
                num_generated[index] += context.engine.num_held_tokens(requests[index].request_id)
            reserved.num_generated = sum(num_generated.values())


def _reserve(
    context: ServerContext, request: Request, requests: Sequence[GenerationRequest], api: str
) -> Reserved:
    """Take what `requests` need of every budget. Raises RateLimited, Overloaded or InvalidRequest."""
    tenant = tenant_of(request)
    if tenant is None and context.access.keys is not None:
        raise Unauthorized("this path takes no request without an API key")
    try:
        return context.admission.reserve(tenant, requests)
    except StemmaError:
        context.metrics.requests.labels(api, "refused").inc()
        raise


@contextmanager
def admitted(context: ServerContext, request: Request) -> Iterator[None]:
    """Count work that generates nothing (tokenizing) as one request of the tenant. Raises RateLimited."""
    with closing(context.admission.reserve_call(tenant_of(request))):
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


async def start(
    context: ServerContext, request: Request, requests: Sequence[GenerationRequest], api: str
) -> OutputStream:
    """Run `requests` and return once the first output is there; raise if the client leaves before that."""
    reserved = _reserve(context, request, requests, api)
    stream = _run_as_asked(context, request, requests, api, reserved)

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
    context: ServerContext, request: Request, requests: Sequence[GenerationRequest], api: str
) -> list[Collected]:
    """Run `requests` and return everything at once; abort them if the client leaves."""
    with closing(_reserve(context, request, requests, api)) as reserved:
        stream = _run_as_asked(context, request, requests, api, reserved)
        return await unless_disconnected(request, _collect(stream, len(requests)))


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
    drafts: Mapping[str, DraftCount] = field(default_factory=dict)


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
