"""An orchestrator's ``kv_hints``: executed, with a verdict on each action.

vLLM, SGLang and Dynamo carry the same envelope and leave its actions to whoever executes them. Here they are
``retain`` (`num_tokens`, `priority`, `ttl_s`), ``pin`` (`num_tokens`, `ttl_s`), ``release`` (`from_token`)
and ``prewarm`` (nothing); all counts are of the request's own prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from stemma.engine.api import GenerationRequest
from stemma.engine.client import EngineClient
from stemma.errors import StemmaError
from stemma.server.observe.collected import Collected, TurnObserver
from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import MAX_INT32, Count
from stemma.server.schemas.shared import KvHintAction, KvHints
from stemma.types import DEFAULT_PRIORITY, MAX_PRIORITY, Retention, RetentionHint, RetentionRange

VERSIONS = ("0.1", "1", "1.0")
MAX_PIN_S = 3600.0
"""Longer pins are the operator's: nobody may keep others' room for ever."""
RETAINED = RetentionHint(DEFAULT_PRIORITY + 20, None)
RELEASED = RetentionHint(0, 0.0)

_Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False, strict=False)]
_Tokens = Annotated[int, Field(ge=1, le=MAX_INT32)]


class _Payload(RequestModel):
    model_config = ConfigDict(extra="forbid")


class _Retain(_Payload):
    num_tokens: _Tokens | None = None
    priority: Count | None = None
    ttl_s: _Seconds | None = None


class _Pin(_Payload):
    num_tokens: _Tokens | None = None
    ttl_s: _Seconds | None = None


class _Release(_Payload):
    from_token: Count = 0


class _Prewarm(_Payload):
    pass


_PAYLOADS: dict[str, type[_Payload]] = {
    "retain": _Retain,
    "pin": _Pin,
    "release": _Release,
    "prewarm": _Prewarm,
}


@dataclass(slots=True)
class Verdict:
    """What became of one action."""

    action_id: str
    verdict: str = "done"
    """``done``, ``clipped`` or ``refused``."""
    reasons: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def clip(self, reason: str) -> None:
        """It was done in part."""
        self.verdict = "clipped"
        self.reasons.append(reason)

    def refuse(self, reason: str) -> None:
        """It wasn't done."""
        self.verdict = "refused"
        self.reasons.append(reason)

    def as_json(self) -> dict[str, Any]:
        """Return it as an answer tells it."""
        why = {"reason": "; ".join(self.reasons)} if self.reasons else {}
        return {"action_id": self.action_id, "verdict": self.verdict, **why, **self.more}


@dataclass(slots=True)
class WantedPin:
    """The blocks to be pinned once they are computed."""

    num_tokens: int
    ttl_s: float
    verdict: Verdict


@dataclass(slots=True)
class Judged:
    """The actions of one request, judged."""

    message_id: str
    retention: Retention
    verdicts: list[Verdict] = field(default_factory=list)
    pins: list[WantedPin] = field(default_factory=list)
    prewarms: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the member ``kv_hints`` of an answer's ``stemma`` object."""
        return {"message_id": self.message_id, "actions": [one.as_json() for one in self.verdicts]}


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    end: int | None
    """None: to the end of the answer."""
    hint: RetentionHint


def judge(asked: KvHints, retention: Retention, num_tokens: int, *, may_pin: bool) -> Judged:
    """Return what the actions come to for a prompt of `num_tokens`. Actions that can't be done do no harm.

    `retention`: what the request asks for otherwise. `may_pin`: False where keys tell tenants apart.
    """
    judged = Judged(asked.message_id, retention)
    kept: list[_Piece] = []
    released: list[_Piece] = []
    for action in asked.actions:
        verdict = Verdict(action.action_id)
        judged.verdicts.append(verdict)
        payload = _payload(action, verdict)
        match payload:
            case _Retain():
                end = _clipped(payload.num_tokens, num_tokens, verdict)
                if payload.priority is not None and payload.priority > MAX_PRIORITY:
                    verdict.clip(f"priority is at most {MAX_PRIORITY}")
                priority = RETAINED.priority if payload.priority is None else payload.priority
                kept.append(_Piece(0, end, RetentionHint(priority, payload.ttl_s)))
            case _Pin():
                end = _clipped(payload.num_tokens, num_tokens, verdict)
                ttl_s = MAX_PIN_S if payload.ttl_s is None else min(payload.ttl_s, MAX_PIN_S)
                if payload.ttl_s is None or payload.ttl_s > MAX_PIN_S:
                    verdict.clip(f"it ends after {MAX_PIN_S:.0f} s")
                if may_pin:
                    judged.pins.append(WantedPin(end, ttl_s, verdict))
                else:
                    verdict.clip("only the operator pins here: it is kept with the highest priority")
                    kept.append(_Piece(0, end, RetentionHint(MAX_PRIORITY, ttl_s)))
            case _Release():
                if payload.from_token >= num_tokens:
                    verdict.clip(f"the prompt has {num_tokens} tokens: its answer alone is released")
                released.append(_Piece(payload.from_token, None, RELEASED))
            case _Prewarm():
                judged.prewarms = True
    if kept or released:
        judged.retention = _combined(retention, kept, released, num_tokens)
    return judged


def _payload(action: KvHintAction, verdict: Verdict) -> _Payload | None:
    kind = _PAYLOADS.get(action.action_type)
    if kind is None:
        verdict.refuse(f"there is no such action; known are {', '.join(_PAYLOADS)}")
        return None
    if action.action_version not in VERSIONS:
        verdict.refuse(f"versions of actions are {', '.join(VERSIONS)}")
        return None
    try:
        return kind.model_validate(action.payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        verdict.refuse(f"payload.{'.'.join(map(str, first['loc']))[:64]}: {first['msg']}")
        return None


def _clipped(wanted: int | None, num_tokens: int, verdict: Verdict) -> int:
    if wanted is not None and wanted > num_tokens:
        verdict.clip(f"the prompt has {num_tokens} tokens")
    return num_tokens if wanted is None else min(wanted, num_tokens)


def _combined(
    base: Retention, kept: Sequence[_Piece], released: Sequence[_Piece], num_tokens: int
) -> Retention:
    """Return the hints of each run of the prompt: the strongest of all that keep it, else its release."""
    ends = {one.end for one in kept} | {one.start for one in released} | {num_tokens}
    ends |= {one.num_tokens for one in base.ranges}
    ranges = []
    start = 0
    for end in sorted(one for one in ends if one is not None and 0 < one <= num_tokens):
        ranges.append(RetentionRange(end, _hint_at(start, base, kept, released)))
        start = end
    return Retention(_hint_at(num_tokens, base, kept, released), tuple(ranges), renews=True)


def _hint_at(at: int, base: Retention, kept: Sequence[_Piece], released: Sequence[_Piece]) -> RetentionHint:
    hints = [one.hint for one in kept if one.start <= at < (one.end or 0)]
    if hints:
        ttls_s = [one.ttl_s for one in hints]
        longest = None if None in ttls_s else max(ttl_s for ttl_s in ttls_s if ttl_s is not None)
        return RetentionHint(max(one.priority for one in hints), longest)
    if any(one.start <= at for one in released):
        return RELEASED
    return next((one.hint for one in base.ranges if at < one.num_tokens), base.rest)


class HintsExecutor(TurnObserver):
    """Does what waits for the end of one turn, and puts the verdicts into its answer."""

    def __init__(self, engine: EngineClient, request: GenerationRequest, judged: Judged) -> None:
        self._engine, self._request, self._judged = engine, request, judged

    async def finished(self, so_far: Collected) -> None:
        """Pin what is to be pinned."""
        for one in self._judged.pins:
            tokens = self._request.prompt_token_ids[: one.num_tokens]
            try:
                pin = await self._engine.cache_control.pin(self._request.namespace, tokens, one.ttl_s)
            except StemmaError as error:
                one.verdict.refuse(str(error))
            else:
                one.verdict.more = {"pin_id": pin.pin_id}
        so_far.notes["kv_hints"] = self._judged.as_json()
