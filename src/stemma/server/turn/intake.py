"""Parts that check requests: the tokenizer, its threads, and the limits of what they take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from stemma.budgets import Budget
from stemma.config.settings import Settings
from stemma.engine.client import EngineClient
from stemma.errors import InvalidRequest
from stemma.server.door.caller import caller
from stemma.server.door.ledger import Admission
from stemma.server.history.joining import HistoryJoiner
from stemma.server.turn.images import RequestImages
from stemma.server.turn.known_texts import KnownTexts
from stemma.server.turn.template_process import TemplateFields, TemplateProcess
from stemma.server.turn.template_rules import TemplateRules
from stemma.types import TokenArray
from stemma.workers import WorkerThreads

T = TypeVar("T")

TOKENIZER_THREADS = 2
"""Tokenizers work outside the GIL; two keep a long prompt from delaying a short one."""
MAX_CHARS_PER_TOKEN = 256
"""More than any common vocabulary's longest token: longer texts can't fit the context."""
AT_ONCE_CHARS = 2048
"""New characters that are tokenized on the event loop, in 0.3 ms, or in 2 if they are chosen to take long. A
thread takes 0.1 to 3 ms to begin."""
MOST_CHARS = 1 << 17
"""Texts up to this length are looked for there, which takes less than a millisecond."""
FOREIGN_TEMPLATE_TIMEOUT_S = 5.0
"""Time limit of a template sent in a request."""
_PARSE_TIMEOUT_S = 30.0


class Intake:
    """Reads the requests of one server; lives in ``app.state.intake``."""

    def __init__(
        self,
        engine: EngineClient,
        settings: Settings,
        admission: Admission,
        history: HistoryJoiner | None,
        *,
        has_tenants: bool,
    ) -> None:
        self.engine = engine
        self.settings = settings
        runnable = settings.engine.scheduler.seats
        self.largest_n = min(runnable, settings.requests.max_n or runnable)
        """The most sequences that one request may ask for: as many as may, and can, run at once."""
        self.bodies: Budget = admission.bodies
        shares = not has_tenants and settings.engine.cache.enable_prefix_cache
        self.known_texts = KnownTexts() if shares else None
        """None where tenants may not learn of each other's prompts, or nothing is shared."""
        self.history = history
        """None: exact history is off."""
        self._limit_s = settings.server.tokenize_timeout_s
        self._renderer: TemplateProcess | None = None
        if settings.server.trust_request_chat_template:
            self._renderer = TemplateProcess(
                min(self._limit_s, FOREIGN_TEMPLATE_TIMEOUT_S),
                MAX_CHARS_PER_TOKEN * engine.max_model_len,
                engine.tokenizer.special_tokens,
            )
        self._tokenizers = WorkerThreads(
            TOKENIZER_THREADS, "stemma-tokenizer", engine.supervisor, admission.tokenizing
        )
        self.images: RequestImages | None = None
        """None: the model reads text alone."""
        if engine.images is not None:
            self.images = RequestImages(
                engine.images, settings.engine.images, admission.images, self._tokenizers, self._limit_s
            )
        self.template_rules = TemplateRules.of(engine.tokenizer, sees=self.images is not None)
        self._parser = WorkerThreads(1, "stemma-parser", engine.supervisor)

    async def tokenized(self, text: str, *, add_special_tokens: bool, salt: str | None) -> TokenArray:
        """Return the ids of `text`: at once where little of it is new, else off the event loop.

        `salt` is that of the namespace that a request is served in: others of that salt may get ids of the
        same text without a tokenizer. None: nobody may. Raises ModelError, and TookTooLong after
        `tokenize_timeout_s`.
        """
        tokenizer, known = self.engine.tokenizer, self.known_texts
        if known is not None and salt is not None and len(text) <= MOST_CHARS:
            most = 0 if tokenizer.cuts is None else AT_ONCE_CHARS
            tokens = known.find(
                tokenizer, text, salt, add_special_tokens=add_special_tokens, most_new_chars=most
            )
            if tokens is not None:
                return tokens
        return await self.tokenize_in_thread(
            partial(self.tokenize, text, add_special_tokens=add_special_tokens, salt=salt)
        )

    def tokenize(self, text: str, *, add_special_tokens: bool, salt: str | None) -> TokenArray:
        """Do the same, whatever it takes; for threads. Raises ModelError."""
        tokenizer, known = self.engine.tokenizer, self.known_texts
        if known is None or salt is None:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return known.encode(tokenizer, text, salt, add_special_tokens=add_special_tokens)

    async def tokenize_in_thread(self, work: Callable[[], T]) -> T:
        """Run `work`, which tokenizes a prompt, off the event loop: that takes 100s of ms on long prompts.

        Raises TookTooLong after `tokenize_timeout_s`, and RateLimited or Overloaded if too many prompts wait.
        """
        return await self._tokenizers.run(
            work, limit_s=self._limit_s, what="tokenizing", owner=caller().tenant
        )

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do the same with what belongs to a request that was admitted, such as its answer: never refused."""
        return await self._tokenizers.run(
            work, limit_s=self._limit_s, what="tokenizing", owner=caller().tenant, is_bounded=False
        )

    async def parse_in_thread(self, work: Callable[[], T]) -> T:
        """Run `work`, which reads a large body, off the event loop. The budget of bodies bounds it."""
        return await self._parser.run(
            work, limit_s=_PARSE_TIMEOUT_S, what="reading the body", owner=caller().tenant
        )

    async def render_foreign(self, template: str, conversation: TemplateFields) -> str:
        """Render `conversation` with a client's own template; raise InvalidRequest if that isn't allowed."""
        if self._renderer is None:
            message = "a request may not bring a chat template: see --trust-request-chat-template"
            raise InvalidRequest(message, param="chat_template")
        return await self._renderer.render(template, conversation)

    def close(self) -> None:
        """End the threads and the process that renders."""
        self._tokenizers.close()
        self._parser.close()
        if self._renderer is not None:
            self._renderer.close()


def intake_of(request: Request) -> Intake:
    """Return what reads the requests of the app that serves `request`."""
    intake: Intake = request.app.state.intake
    return intake
