"""One server's parts: each room makes and names what it needs; here they are put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from starlette.datastructures import State

from stemma.config.settings import Settings
from stemma.config.words import read_secret
from stemma.engine.client import EngineClient
from stemma.insight.divergence_window import DivergenceWindow
from stemma.server.answers.families import answer_format
from stemma.server.answers.logprobs import TokenTexts
from stemma.server.apis.responses.store import OwnedStore, Stores
from stemma.server.door.access import Access
from stemma.server.door.ledger import Admission
from stemma.server.door.published import PublishedPrefixes
from stemma.server.door.quotas import CacheQuotas
from stemma.server.guest_apis import begun_parts, check_guests
from stemma.server.history.parts import WrittenHistory
from stemma.server.history.preparing import TurnPreparer
from stemma.server.lifecycle import Lifecycle
from stemma.server.observe.explain import Explainer
from stemma.server.observe.explanations import Explanations
from stemma.server.observe.instruments import Instruments
from stemma.server.observe.metrics import ServerMetrics
from stemma.server.observe.prompt_parts import RecentPrompts
from stemma.server.observe.refusals import Refusals
from stemma.server.observe.usage_ledger import UsageLedger
from stemma.server.observe.watches import Watches
from stemma.server.operator.context import OperatorContext, alias_names
from stemma.server.operator.late_pool import attaching_late_pool
from stemma.server.turn.build import TurnBuilder
from stemma.server.turn.context import ApiContext
from stemma.server.turn.intake import Intake
from stemma.server.turn.observers import observers
from stemma.server.turn.reports import Reports
from stemma.server.turn.run import TurnRunner


def put_parts(app: FastAPI, engine: EngineClient, settings: Settings, metrics: ServerMetrics) -> None:
    """Make a server's parts and leave them in its application's `state`, where each room finds its own.

    Raises ConfigError or StorageError.
    """
    check_guests(settings)
    state = app.state
    server, tokenizer = settings.server, engine.tokenizer
    state.access = access = Access(server)
    state.admission = admission = Admission(settings, engine)
    state.lifecycle = lifecycle = Lifecycle()
    published = PublishedPrefixes(server.public_prefixes, settings.engine.cache.block_size)
    state.history = history = WrittenHistory.of(
        server, engine, metrics, ttl_s=settings.engine.tiers.disk_cache_ttl_s
    )
    joiner = None if history is None else history.joiner
    state.intake = intake = Intake(engine, settings, admission, joiner, has_tenants=access.keys is not None)
    state.instruments = instruments = _instruments(settings, engine, metrics, intake)
    state.refusals = Refusals(instruments.watches.lately, logs=server.log_requests)
    metrics.register(state.refusals)
    quotas = CacheQuotas(access.keys, engine)
    state.turns = turns = TurnPreparer(engine, settings, lifecycle)
    metrics.register(turns)
    rounded_to = None if server.report_granularity == "token" else settings.engine.cache.block_size
    state.runner = runner = TurnRunner(
        engine,
        settings,
        admission,
        quotas,
        lifecycle,
        metrics,
        Reports(tokenizer, turns, instruments.explainer, rounded_to),
        list(observers(engine, instruments, None if joiner is None else joiner.written, turns)),
    )

    form = answer_format(server.tool_parser, server.reasoning_parser, tokenizer)
    builder = TurnBuilder(settings.requests, access, published, signs=server.receipts is not None)
    state.api = ApiContext(
        engine, settings, intake, builder, runner, instruments.recent, form, TokenTexts(tokenizer)
    )
    aliases, bundle_key = alias_names(settings), read_secret(server.bundle_key_file)
    state.operator = OperatorContext(
        engine,
        settings,
        access,
        admission,
        intake,
        instruments,
        lifecycle,
        published,
        aliases,
        bundle_key,
        history,
    )
    limits = (server.max_responses, server.max_response_bytes // 2, server.response_ttl_s)
    state.stores = Stores(OwnedStore(*limits), OwnedStore(*limits))
    state.guest_parts = begun_parts(app)


def _instruments(
    settings: Settings, engine: EngineClient, metrics: ServerMetrics, intake: Intake
) -> Instruments:
    """Make what watches the data path."""
    is_exact = settings.server.report_granularity == "token"
    return Instruments(
        metrics,
        Watches(metrics),
        UsageLedger.of(settings.server.ledger, engine, metrics),
        Explanations(),
        Explainer(engine.tokenizer, intake.in_thread, is_exact=is_exact),
        DivergenceWindow(),
        RecentPrompts(),
    )


@asynccontextmanager
async def running(state: State) -> AsyncIterator[None]:
    """Run what works beside requests."""
    async with AsyncExitStack() as stack:
        stack.callback(state.turns.end)
        await stack.enter_async_context(attaching_late_pool(state.api.engine))
        for part in state.guest_parts:
            await stack.enter_async_context(part)
        yield


def close_parts(state: State) -> None:
    """End the threads, and write what is waiting."""
    state.intake.close()
    state.instruments.ledger.close()
    if state.history is not None:
        state.history.close()
