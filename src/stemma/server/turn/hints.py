"""Hints of a request to the cache: the salt that isolates it, how long its blocks stay, and its session."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stemma.errors import InvalidRequest
from stemma.server.schemas.bounds import MAX_NAME_CHARS
from stemma.server.schemas.openai import KeptTokens, OpenAIRequest
from stemma.server.schemas.shared import KeptRequest, KvHints
from stemma.types import DEFAULT_PRIORITY, NO_HINT, NO_RETENTION, Retention, RetentionHint, RetentionRange

_HEADERS: tuple[tuple[str, ...], ...] = (
    ("x-dynamo-session-id",),
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("session-id",),
    ("session_id",),
    ("x-session-id",),
)
"""Headers in which clients name their conversations. The first that is there counts, with what stands beside
it: Claude Code's agents share its session. The next two are Codex's, the last is OpenCode's."""


KEPT_PRIORITY = DEFAULT_PRIORITY + 20
"""Priority of blocks that a client wants kept for some time."""
_DURATION = re.compile(r"([0-9]{1,6})([smhd])")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says of its use of the cache. No answer depends on it."""

    salt: str = ""
    retention: Retention = NO_RETENTION
    session: str = ""
    """What the client calls its conversation in the body; empty: perhaps a header says."""
    kv_hints: KvHints | None = None
    prewarms: bool = False
    """The prompt is computed for later, and there is no answer."""


NO_HINTS = Hints()


def hints_of(body: KeptRequest) -> Hints:
    """Return the hints of a body. Raises InvalidRequest if the ranges of `cache_retention` don't ascend."""
    options = body.prompt_cache_options
    rest = hint_of(body.priority, body.cache_ttl_s, _kept_for(body))
    prewarms = options is not None and options.prewarm
    if not isinstance(body, OpenAIRequest):
        return Hints(body.cache_salt or "", Retention(rest), "", body.kv_hints, prewarms)
    retention = Retention(rest, _ranges_of(body.cache_retention or ()))
    session = body.prompt_cache_key or body.session_id or ""
    return Hints(body.cache_salt or "", retention, session, body.kv_hints, prewarms)


def _kept_for(body: KeptRequest) -> RetentionHint:
    """Return the hint of OpenAI's ttl, or of its older word for it. Raises InvalidRequest."""
    options = body.prompt_cache_options
    if options is not None and options.ttl is not None:
        where, given = "prompt_cache_options.ttl", options.ttl
    elif body.prompt_cache_retention not in (None, "in_memory", "in-memory"):
        where, given = "prompt_cache_retention", body.prompt_cache_retention
    else:
        return NO_HINT
    found = _DURATION.fullmatch(given)
    if found is None:
        raise InvalidRequest(f"{where} is a duration such as 30m, 12h or 24h", param=where)
    return RetentionHint(KEPT_PRIORITY, float(found[1]) * _UNITS_S[found[2]])


def hint_of(priority: int | None, ttl_s: float | None, default: RetentionHint = NO_HINT) -> RetentionHint:
    """Return the hint that a body, or a part of it, brings; `default` holds where it is silent."""
    return RetentionHint(
        default.priority if priority is None else priority, default.ttl_s if ttl_s is None else ttl_s
    )


def _ranges_of(given: Sequence[KeptTokens]) -> tuple[RetentionRange, ...]:
    ends = [one.num_tokens for one in given]
    if any(end <= before for before, end in pairwise(ends)):
        raise InvalidRequest("cache_retention: num_tokens must ascend", param="cache_retention")
    return tuple(RetentionRange(one.num_tokens, hint_of(one.priority, one.cache_ttl_s)) for one in given)


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session that headers name, or nothing if none does or its name is too long: it is a hint."""
    for first, *others in _HEADERS:
        if name := headers.get(first, ""):
            name = "/".join((name, *filter(None, (headers.get(other) for other in others))))
            return name if len(name) <= MAX_NAME_CHARS else ""
    return ""
