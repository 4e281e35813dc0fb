"""From what a plane read of a body to one turn: the engine's request, and what those who watch it need."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from starlette.requests import Request

from stemma.config.server_settings import RequestSettings
from stemma.engine.api import GenerationRequest
from stemma.engine.pooling import Pooling
from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.errors import InvalidRequest, Unauthorized
from stemma.model.lora.adapter import Adapter
from stemma.model.vision.prompt import PromptImages
from stemma.prefix.keys import Namespace
from stemma.server.answers.chat import AnswerReader
from stemma.server.door.access import Access, tenant_of
from stemma.server.door.answer_memory import NOTHING_ELSE, PromptTold, told_signed
from stemma.server.door.caller import Caller, caller
from stemma.server.door.namespace import tenant_namespace
from stemma.server.door.published import PublishedPrefixes
from stemma.server.history.joining import History
from stemma.server.history.next_turn import NextTurn
from stemma.server.observe.explain import is_asked
from stemma.server.observe.prompt_parts import Difference, PromptParts, RecentPrompts
from stemma.server.turn.hints import NO_HINTS, Hints, session_of
from stemma.server.turn.kv_hints import Judged, judge
from stemma.types import TokenArray

SIGNED = ("chat", "completions", "responses", "messages")
"""APIs whose answers may have receipts."""
_NO_ANSWER = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""What an engine is asked for that is to compute a prompt: it draws one token, which nobody gets."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The tokens of one prompt."""

    token_ids: TokenArray
    history: History | None = None
    """None: exact history is off for it."""
    images: PromptImages | None = None
    """None: it has none."""
    parts: PromptParts | None = None
    """What it was rendered from; None: it is no conversation."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Asked:
    """What a plane reads from a body for one prompt. All else of a turn is the same for every plane."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    hints: Hints = NO_HINTS
    adapter: Adapter | None = None
    beam: BeamParams | None = None
    pooling: Pooling | None = None
    roles: tuple[str, ...] = ()
    shows_steps: bool = False
    told: PromptTold = NOTHING_ELSE
    """What its answer tells beside text and log-probabilities."""
    reader: AnswerReader | None = None
    """None: the answer's text is passed on as it is."""
    next_turn: NextTurn | None = None
    """None: what follows its answer can't be known."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request on its way through the server: made once, by `TurnBuilder`."""

    request: GenerationRequest
    api: str
    """Name of its plane: ``chat``, ``completions``, ``tgi``..."""
    caller: Caller
    asked: Asked
    is_explained: bool = False
    """Its client asked why what isn't reused isn't."""
    judged: Judged | None = None
    """Its ``kv_hints``; None: it has none."""
    receipt: bool | str = False
    """Its client wants a signed statement of it; ``hashed``: without ids and texts."""

    @property
    def prewarms(self) -> bool:
        """Whether the prompt is computed for later, and there is no answer."""
        return self.asked.hints.prewarms or (self.judged is not None and self.judged.prewarms)

    @property
    def reader(self) -> AnswerReader:
        """What reads its answer; for planes that gave one."""
        assert self.asked.reader is not None
        return self.asked.reader

    def since(self, recent: RecentPrompts, earlier_id: str) -> Difference | None:
        """Return how it differs from an earlier turn; None: that isn't known any more, or is another's."""
        parts = self.asked.prompt.parts
        return None if parts is None else recent.since(earlier_id, self.request, parts)

    def tools_called(self, text: str) -> tuple[str, ...]:
        """Return the names of the tools that a whole answer calls."""
        reader = self.asked.reader
        return () if reader is None or not reader.tools.schemas else reader.tools_called(text)


@dataclass(frozen=True, slots=True)
class TurnBuilder:
    """Makes the turns of one server. Every plane passes here: none forgets tenants or published prefixes."""

    limits: RequestSettings
    access: Access
    published: PublishedPrefixes
    signs: bool = False
    """Whether there are receipts."""

    def build(self, http: Request, api: str, asked: Asked) -> Turn:
        """Return the turn. Raises Unauthorized without a tenant, where there are tenants."""
        hints, num_tokens = asked.hints, len(asked.prompt.token_ids)
        judged = None
        if hints.kv_hints is not None:
            may_pin = self.access.keys is None
            judged = judge(hints.kv_hints, hints.retention, num_tokens, may_pin=may_pin)
        prewarms = hints.prewarms or (judged is not None and judged.prewarms)
        if receipt := self._receipt(http, api, asked):
            asked = replace(asked, told=told_signed(asked.told, asked.prompt.token_ids))
        request = GenerationRequest(
            request_id=asked.request_id,
            prompt_token_ids=asked.prompt.token_ids,
            params=_NO_ANSWER if prewarms else self._limited(asked.params, is_seeded=bool(receipt)),
            namespace=self._namespace(http, asked),
            retention=hints.retention if judged is None else judged.retention,
            beam=asked.beam,
            pooling=asked.pooling,
            adapter=asked.adapter,
            session=hints.session or session_of(http.headers),
            roles=asked.roles,
            images=asked.prompt.images,
            shows_steps=asked.shows_steps,
        )
        receipt = False if prewarms else receipt
        return Turn(request, api, caller(), asked, is_asked(http), judged, receipt)

    def _receipt(self, http: Request, api: str, asked: Asked) -> bool | str:
        """Return what receipt the body asks for. Raises InvalidRequest where there is none."""
        wanted: bool | str = getattr(http.state, "receipt", False)
        if wanted and not self.signs:
            raise InvalidRequest("this server signs no receipts (--receipts)", param="stemma.receipt")
        if wanted and (api not in SIGNED or asked.beam is not None):
            raise InvalidRequest("there is no receipt of this kind of answer", param="stemma.receipt")
        return wanted

    def _limited(self, params: SamplingParams, *, is_seeded: bool) -> SamplingParams:
        """Return `params` with no more output than the operator allows; `is_seeded`: with a seed."""
        if is_seeded and params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        most = self.limits.max_output_tokens
        if most is None or (params.max_tokens is not None and params.max_tokens <= most):
            return params
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))

    def _namespace(self, http: Request, asked: Asked) -> Namespace:
        """Return where its blocks are: the client's salt and adapter, in the tenant's part, or published."""
        found = Namespace(salt=asked.hints.salt, adapter="" if asked.adapter is None else asked.adapter.key)
        if self.access.keys is not None:
            tenant = tenant_of(http)
            if tenant is None:
                raise Unauthorized("this path takes no request without an API key")
            found = tenant_namespace(self.access.keys.secret, tenant.name, found)
        return self.published.located(found, asked.prompt.token_ids)
