"""What every handler shares: the engine, the settings, the metrics, and threads for tokenization."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

from starlette.requests import Request

from stemma.config.settings import Settings
from stemma.config.words import read_secret
from stemma.engine.client import EngineClient
from stemma.errors import ConfigError, InvalidRequest
from stemma.insight.divergence.window import DivergenceWindow
from stemma.server.access import Access
from stemma.server.admission.caller import caller
from stemma.server.admission.ledger import Admission
from stemma.server.answers.families import answer_format
from stemma.server.apis.responses.store import OwnedStore, StoredConversation, StoredResponse
from stemma.server.observe.explain import Explainer
from stemma.server.observe.explanations import Explanations
from stemma.server.observe.metric_aliases import Names
from stemma.server.observe.metrics import ServerMetrics
from stemma.server.observe.mindie_metrics import MINDIE_NAMES
from stemma.server.observe.usage_ledger import UsageLedger
from stemma.server.observe.vllm_metrics import VLLM_NAMES
from stemma.server.observe.watches import Watches
from stemma.server.requests.conversation import Conversation
from stemma.server.requests.known_texts import KnownTexts
from stemma.server.requests.template_process import TemplateProcess
from stemma.server.tenants.published import PublishedPrefixes
from stemma.types import Tier
from stemma.workers import WorkerThreads

T = TypeVar("T")
Maintenance = Literal["paused", "ready"]
"""``paused``: no steps are run; ``ready``: nor are they after MindIE's reinitialisation, before its start."""
ALIASES = {"vllm": VLLM_NAMES, "mindie": MINDIE_NAMES}

TOKENIZER_THREADS = 2
"""Tokenizers work outside the GIL; two keep a long prompt from delaying a short one."""
MAX_CHARS_PER_TOKEN = 256
"""More than any common vocabulary's longest token: longer texts can't fit the context."""
FOREIGN_TEMPLATE_TIMEOUT_S = 5.0
"""Time limit of a template sent in a request."""
_PARSE_TIMEOUT_S = 30.0


class ServerContext:
    """One server's state; lives in ``app.state.context``."""

    def __init__(self, engine: EngineClient, settings: Settings, metrics: ServerMetrics) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.started_at = int(time.time())
        self.draining = False
        self.maintenance: Maintenance | None = None
        """What an operator's fault handling has left the engine in; None: it serves."""
        self.stop: Callable[[float | None], None] | None = None
        """Drains and stops the server within the given seconds; None if only its creator can stop it."""
        self.access = Access(settings.server)
        self.admission = Admission(settings, engine)
        self.published = PublishedPrefixes(settings.server.public_prefixes, settings.engine.cache.block_size)
        self._quotas: dict[str, Mapping[Tier, int]] = {}
        self.watches = Watches(metrics)
        self.metric_aliases = alias_names(settings)
        self.num_live_streams = 0
        """Pages that watch this server."""
        self.explanations = Explanations()
        is_exact = settings.server.report_granularity == "token"
        self.explainer = Explainer(engine.tokenizer, self.in_thread, is_exact=is_exact)
        self.divergences = DivergenceWindow()
        self.divergences_lock = asyncio.Lock()
        """Held while a report on them is made."""
        self.ledger = UsageLedger.of(settings.server.ledger, engine, metrics)
        self.bundle_key = read_secret(settings.server.bundle_key_file)
        self._renderer: TemplateProcess | None = None
        if settings.server.trust_request_chat_template:
            self._renderer = TemplateProcess(
                min(settings.server.tokenize_timeout_s, FOREIGN_TEMPLATE_TIMEOUT_S),
                MAX_CHARS_PER_TOKEN * engine.max_model_len,
                engine.tokenizer.special_tokens,
            )
        self.answer_format = answer_format(
            settings.server.tool_parser, settings.server.reasoning_parser, engine.tokenizer.chat_template
        )
        limits = (
            settings.server.max_responses,
            settings.server.max_response_bytes // 2,
            settings.server.response_ttl_s,
        )
        self.responses = OwnedStore[StoredResponse](*limits)
        self.conversations = OwnedStore[StoredConversation](*limits)
        self._token_texts: dict[int, str] = {}
        shares = self.access.keys is None and settings.engine.cache.enable_prefix_cache
        self.known_texts = KnownTexts() if shares else None
        """None where tenants may not learn of each other's prompts, or nothing is shared."""
        self._tokenizers = WorkerThreads(
            TOKENIZER_THREADS, "stemma-tokenizer", engine.supervisor, self.admission.tokenizing
        )
        self._parser = WorkerThreads(1, "stemma-parser", engine.supervisor)

    async def apply_quotas(self) -> None:
        """Tell the engine what the tenants' blocks may take, if that has changed since the last call."""
        if self.access.keys is None:
            return
        tenants = self.access.keys.tenants
        quotas = {one.name: one.entry.cache_bytes for one in tenants if one.entry.cache_bytes}
        if quotas == self._quotas:
            return
        before, self._quotas = self._quotas, quotas
        try:
            await self.engine.cache_control.set_quotas(quotas)
        except BaseException:
            self._quotas = before
            raise

    async def tokenize_in_thread(self, work: Callable[[], T]) -> T:
        """Run `work`, which tokenizes a prompt, off the event loop: that takes 100s of ms on long prompts.

        Raises TookTooLong after `tokenize_timeout_s`, and RateLimited or Overloaded if too many prompts wait.
        """
        limit_s = self.settings.server.tokenize_timeout_s
        return await self._tokenizers.run(work, limit_s=limit_s, what="tokenizing", owner=caller().tenant)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do the same with what belongs to a request that was admitted, such as its answer: never refused."""
        limit_s = self.settings.server.tokenize_timeout_s
        owner = caller().tenant
        return await self._tokenizers.run(
            work, limit_s=limit_s, what="tokenizing", owner=owner, is_bounded=False
        )

    async def parse_in_thread(self, work: Callable[[], T]) -> T:
        """Run `work`, which reads a large body, off the event loop. The budget of bodies bounds it."""
        return await self._parser.run(
            work, limit_s=_PARSE_TIMEOUT_S, what="reading the body", owner=caller().tenant
        )

    async def render_foreign(self, template: str, conversation: Conversation) -> str:
        """Render `conversation` with a client's own template; raise InvalidRequest if that isn't allowed."""
        if self._renderer is None:
            message = "a request may not bring a chat template: see --trust-request-chat-template"
            raise InvalidRequest(message, param="chat_template")
        return await self._renderer.render(template, conversation)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special ones included; remembered, as log-probabilities need many."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.engine.tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    def close(self) -> None:
        """End the threads."""
        self._tokenizers.close()
        self.ledger.close()
        self._parser.close()
        if self._renderer is not None:
            self._renderer.close()


def alias_names(settings: Settings) -> list[Names]:
    """Return whose names `/metrics` shows beside ours. Raises ConfigError for one that nobody knows."""
    wanted = dict.fromkeys(name for name in settings.server.metric_aliases if name != "none")
    if settings.requests.dialect == "mindie":
        wanted["mindie"] = None
    for name in wanted:
        if name not in ALIASES:
            raise ConfigError(f"metric_aliases: {name!r} is none of {', '.join(ALIASES)}, none")
    return [ALIASES[name] for name in wanted]


def context_of(request: Request) -> ServerContext:
    """Return the context of the app that serves `request`."""
    context: ServerContext = request.app.state.context
    return context


def new_request_id(prefix: str) -> str:
    """Return a fresh id, e.g. ``chatcmpl-4f1c...``."""
    return f"{prefix}-{uuid.uuid4().hex}"
