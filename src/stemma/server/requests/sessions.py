"""What clients call their conversations in headers, as other servers and agents have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request

from stemma.engine.api import GenerationRequest
from stemma.server.schemas.bounds import MAX_NAME_CHARS

_HEADERS: tuple[tuple[str, ...], ...] = (
    ("x-dynamo-session-id",),
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("session-id",),
    ("session_id",),
    ("x-session-id",),
)
"""The first that is there counts, with what stands beside it: Claude Code's agents share its session. The
next two are Codex's, the last is OpenCode's."""


def with_session(request: Request, requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
    """Return the requests of one call; those whose body names no session get that of its headers, if any."""
    name = _named(request)
    return [replace(one, session=one.session or name) for one in requests] if name else requests


def _named(request: Request) -> str:
    """Return the name, "" for none, or one that is too long: it is a hint, so that is no error."""
    headers = request.headers
    for first, *others in _HEADERS:
        if name := headers.get(first, ""):
            name = "/".join((name, *filter(None, (headers.get(other) for other in others))))
            return name if len(name) <= MAX_NAME_CHARS else ""
    return ""
