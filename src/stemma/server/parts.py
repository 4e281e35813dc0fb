"""One server's parts: each room makes and names what it needs; here they are put together."""

from __future__ import annotations

from functools import cache

from starlette.datastructures import State

from stemma.config.settings import Settings
from stemma.config.words import read_secret
from stemma.engine.client import EngineClient
from stemma.insight.divergence.window import DivergenceWindow
from stemma.server.access import Access
from stemma.server.admission.ledger import Admission
from stemma.server.answers.families import answer_format
from stemma.server.apis.context import ApiContext
from stemma.server.apis.responses.store import OwnedStore, Stores
from stemma.server.generation import RequestRunner
from stemma.server.history.parts import WrittenHistory
from stemma.server.lifecycle import Lifecycle
from stemma.server.observe.explain import Explainer
from stemma.server.observe.explanations import Explanations
from stemma.server.observe.instruments import Instruments
from stemma.server.observe.metrics import ServerMetrics
from stemma.server.observe.usage_ledger import UsageLedger
from stemma.server.observe.watches import Watches
from stemma.server.operator.context import OperatorContext, alias_names
from stemma.server.requests.intake import Intake
from stemma.server.tenants.published import PublishedPrefixes
from stemma.server.tenants.quotas import CacheQuotas


def put_parts(state: State, engine: EngineClient, settings: Settings, metrics: ServerMetrics) -> None:
    """Make a server's parts and leave them in its application's `state`, where each room finds its own.

    Raises ConfigError or StorageError.
    """
    server, tokenizer = settings.server, engine.tokenizer
    state.access = access = Access(server)
    state.admission = admission = Admission(settings, engine)
    state.lifecycle = lifecycle = Lifecycle()
    published = PublishedPrefixes(server.public_prefixes, settings.engine.cache.block_size)
    state.history = history = WrittenHistory.of(server, engine, metrics)
    joiner = None if history is None else history.joiner
    state.intake = intake = Intake(engine, settings, admission, joiner, has_tenants=access.keys is not None)
    state.instruments = instruments = Instruments(
        metrics,
        Watches(metrics),
        UsageLedger.of(server.ledger, engine, metrics),
        Explanations(),
        Explainer(tokenizer, intake.in_thread, is_exact=server.report_granularity == "token"),
        DivergenceWindow(),
    )
    quotas = CacheQuotas(access.keys, engine)
    state.runner = runner = RequestRunner(
        engine,
        settings,
        access,
        admission,
        published,
        quotas,
        instruments,
        lifecycle,
        None if joiner is None else joiner.written,
    )

    @cache
    def token_text(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    form = answer_format(server.tool_parser, server.reasoning_parser, tokenizer.chat_template)
    state.api = ApiContext(engine, settings, intake, runner, form, token_text)
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


def close_parts(state: State) -> None:
    """End the threads, and write what is waiting."""
    state.intake.close()
    state.instruments.ledger.close()
    if state.history is not None:
        state.history.close()
