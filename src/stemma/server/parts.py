"""One server's parts: each room makes and names what it needs; here they are put together."""

from __future__ import annotations

from dataclasses import dataclass, fields

from starlette.datastructures import State

from stemma.config.settings import Settings
from stemma.config.words import read_secret
from stemma.engine.client import EngineClient
from stemma.server.access import Access
from stemma.server.admission.ledger import Admission
from stemma.server.answers.families import answer_format
from stemma.server.answers.token_texts import TokenTexts
from stemma.server.apis.context import ApiContext
from stemma.server.apis.responses.store import Stores
from stemma.server.generation import RequestRunner
from stemma.server.lifecycle import Lifecycle
from stemma.server.observe.instruments import Instruments
from stemma.server.observe.metrics import ServerMetrics
from stemma.server.operator.context import OperatorContext, alias_names
from stemma.server.requests.intake import Intake
from stemma.server.tenants.published import PublishedPrefixes
from stemma.server.tenants.quotas import CacheQuotas


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server is made of."""

    access: Access
    admission: Admission
    intake: Intake
    instruments: Instruments
    lifecycle: Lifecycle
    runner: RequestRunner
    api: ApiContext
    operator: OperatorContext
    stores: Stores

    @classmethod
    def of(cls, engine: EngineClient, settings: Settings, metrics: ServerMetrics) -> Parts:
        """Return those of a server over `engine`. Raises ConfigError or StorageError."""
        server, cache = settings.server, settings.engine.cache
        access, admission, lifecycle = Access(server), Admission(settings, engine), Lifecycle()
        published = PublishedPrefixes(server.public_prefixes, cache.block_size)
        quotas = CacheQuotas(access.keys, engine)
        form = answer_format(server.tool_parser, server.reasoning_parser, engine.tokenizer.chat_template)
        aliases, bundle_key = alias_names(settings), read_secret(server.bundle_key_file)
        intake = Intake(engine, settings, admission, has_tenants=access.keys is not None)
        instruments = Instruments.of(server, engine, metrics, intake.in_thread)
        runner = RequestRunner(engine, settings, access, admission, published, quotas, instruments, lifecycle)
        texts = TokenTexts(engine.tokenizer)
        api = ApiContext(engine, settings, intake, runner, form, texts)
        operator = OperatorContext(
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
        )
        stores = Stores.of(server)
        return cls(access, admission, intake, instruments, lifecycle, runner, api, operator, stores)

    def put_into(self, state: State) -> None:
        """Let each room find its own in the application's `state`, by the names of the fields here."""
        for one in fields(self):
            setattr(state, one.name, getattr(self, one.name))

    def close(self) -> None:
        """End the threads, and write what is waiting."""
        self.intake.close()
        self.instruments.ledger.close()
