"""What a proxy notes of requests that it refused, or that no server took: who, and why."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from stemma.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    StemmaError,
    Unauthorized,
)
from stemma.server.observe.refusals import Refusals
from stemma_router.routing.prompts import GENERATING, POOLED

_MOST_ERROR_BYTES = 64 * 1024
_KINDS: dict[int, type[StemmaError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    413: BodyTooLarge,
    429: RateLimited,
    503: Overloaded,
}


def noted(refusals: Refusals, request: Request, answer: Response) -> Response:
    """Return `answer`; if it is a server's refusal, that is noted."""
    status = answer.status_code
    kind = _KINDS.get(status, InvalidRequest if 400 <= status < 500 else None)
    if kind is not None and not isinstance(answer, StreamingResponse):
        refusals.note(request, kind(_message_in(bytes(answer.body))), route_of(request), status)
    return answer


def route_of(request: Request) -> str:
    """Return the path, if it is one of ours: what is counted isn't a client's to choose."""
    path: str = request.scope["path"]
    return path if path in GENERATING or path in POOLED else "others"


def _message_in(body: bytes) -> str:
    try:
        error = orjson.loads(body if len(body) < _MOST_ERROR_BYTES else b"")["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "no server took it"
