"""Hints of a request to the cache: the salt that isolates it, how long its blocks stay, and its session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stemma.errors import InvalidRequest
from stemma.server.schemas.bounds import MAX_NAME_CHARS
from stemma.server.schemas.openai import KeptTokens, OpenAIRequest
from stemma.server.schemas.shared import KeptRequest
from stemma.types import NO_HINT, NO_RETENTION, Retention, RetentionHint, RetentionRange

_HEADERS: tuple[tuple[str, ...], ...] = (
    ("x-dynamo-session-id",),
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("session-id",),
    ("session_id",),
    ("x-session-id",),
)
"""Headers in which clients name their conversations. The first that is there counts, with what stands beside
it: Claude Code's agents share its session. The next two are Codex's, the last is OpenCode's."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says of its use of the cache. No answer depends on it."""

    salt: str = ""
    retention: Retention = NO_RETENTION
    session: str = ""
    """What the client calls its conversation in the body; empty: perhaps a header says."""


NO_HINTS = Hints()


def hints_of(body: KeptRequest) -> Hints:
    """Return the hints of a body. Raises InvalidRequest if the ranges of `cache_retention` don't ascend."""
    rest = hint_of(body.priority, body.cache_ttl_s)
    if not isinstance(body, OpenAIRequest):
        return Hints(body.cache_salt or "", Retention(rest))
    retention = Retention(rest, _ranges_of(body.cache_retention or ()))
    return Hints(body.cache_salt or "", retention, body.prompt_cache_key or body.session_id or "")


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
