"""The objects that the operator's plane shows and changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request

from stemma.config.settings import Settings
from stemma.engine.client import EngineClient
from stemma.errors import ConfigError
from stemma.server.door.access import Access
from stemma.server.door.ledger import Admission
from stemma.server.door.published import PublishedPrefixes
from stemma.server.guest_apis import guest_apis
from stemma.server.history.parts import WrittenHistory
from stemma.server.lifecycle import Lifecycle
from stemma.server.observe.instruments import Instruments
from stemma.server.observe.metric_aliases import AliasNames
from stemma.server.observe.vllm_metrics import VLLM_NAMES
from stemma.server.turn.intake import Intake

_OWN_ALIASES = {"vllm": VLLM_NAMES}


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """One server's; lives in ``app.state.operator``."""

    engine: EngineClient
    settings: Settings
    access: Access
    admission: Admission
    intake: Intake
    instruments: Instruments
    lifecycle: Lifecycle
    published: PublishedPrefixes
    metric_aliases: list[AliasNames]
    bundle_key: bytes | None
    history: WrittenHistory | None
    """None: exact history is off."""
    reporting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a report on divergences is made."""


def context_of(request: Request) -> OperatorContext:
    """Return what the operator of the app that serves `request` works with."""
    context: OperatorContext = request.app.state.operator
    return context


def alias_names(settings: Settings) -> list[AliasNames]:
    """Return whose names `/metrics` shows beside ours.

    Raises ConfigError for one that nobody knows.
    """
    guests = {name: api.metric_names for name, api in guest_apis().items() if api.metric_names is not None}
    known = guests | _OWN_ALIASES
    wanted = dict.fromkeys(name for name in settings.server.metric_aliases if name != "none")
    for name in wanted:
        if name not in known:
            raise ConfigError(f"metric_aliases: {name!r} is none of {', '.join(known)}, none")
    if (dialect := settings.requests.dialect) in guests:
        wanted[dialect] = None
    return [known[name] for name in wanted]
