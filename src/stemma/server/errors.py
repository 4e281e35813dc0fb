"""Each API's own shape of errors. `routes.py` turns what a handler raises into it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response

from stemma.errors import (
    BodyTooLarge,
    EngineFailed,
    Forbidden,
    GenerationFailed,
    InvalidRequest,
    NotFound,
    OverBudget,
    Overloaded,
    PromptTooLong,
    RateLimited,
    ShuttingDown,
    StemmaError,
    TookTooLong,
    Unauthorized,
    UnknownModel,
    WrongMediaType,
)

RETRY_AFTER_DRAIN_S = 5
STATUS_CLIENT_CLOSED = 499
"""Status that proxies log for a client that left; nobody reads the body."""


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return `body` as JSON."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def openai_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, dict[str, str | None]]:
    """Return the body of an error as OpenAI's API shapes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class _Words:
    """The words by which an API names an error."""

    status: int
    kind: str
    code: str | None = None


class ErrorShape:
    """How one API tells errors. Called with one, it returns the response."""

    def __init__(self, name: str, column: int, make: Callable[[StemmaError, _Words], dict[str, Any]]) -> None:
        """`name` is that of the schema in the OpenAPI document; `column`: of `_ERRORS`."""
        self.name = name
        self._column = column
        self._make = make

    def __call__(self, error: StemmaError) -> Response:
        """Return the response for `error`."""
        words = self._words(error)
        return json_response(self._make(error, words), words.status, _retry_headers(error))

    def body(self, error: StemmaError) -> dict[str, Any]:
        """Return the body for `error`, for an answer that has begun."""
        return self._make(error, self._words(error))

    def _words(self, error: StemmaError) -> _Words:
        return next(_Words(*row[self._column]) for row in _ERRORS if isinstance(error, row[0]))


def _retry_headers(error: StemmaError) -> dict[str, str]:
    if isinstance(error, OverBudget):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, ShuttingDown | EngineFailed):
        return {"retry-after": str(RETRY_AFTER_DRAIN_S)}
    return {}


_BAD, _OURS = "invalid_request_error", "server_error"
_ERRORS: tuple[tuple[Any, ...], ...] = (
    (PromptTooLong, (400, _BAD, "context_length_exceeded"), (400, _BAD), (422, "Input Validation Error")),
    (UnknownModel, (404, _BAD, "model_not_found"), (404, "not_found_error"), (404, "NotFoundError")),
    (NotFound, (404, _BAD, "not_found"), (404, "not_found_error"), (404, "NotFoundError")),
    (BodyTooLarge, (413, _BAD, "request_too_large"), (413, "request_too_large"), (413, "Bad Request")),
    (Unauthorized, (401, _BAD, "invalid_api_key"), (401, "authentication_error"), (401, "Unauthorized")),
    (Forbidden, (403, _BAD, "forbidden"), (403, "permission_error"), (403, "Forbidden")),
    (WrongMediaType, (415, _BAD, "wrong_media_type"), (415, _BAD), (415, "Bad Request")),
    (TookTooLong, (408, _BAD, "timeout"), (408, "timeout_error"), (408, "Request Timeout")),
    (InvalidRequest, (400, _BAD), (400, _BAD), (422, "Input Validation Error")),
    (
        RateLimited,
        (429, "rate_limit_error", "rate_limit_exceeded"),
        (429, "rate_limit_error"),
        (429, "Too Many Requests"),
    ),
    (Overloaded, (503, _OURS, "queue_full"), (529, "overloaded_error"), (503, "Service Unavailable")),
    (ShuttingDown, (503, _OURS, "shutting_down"), (503, "overloaded_error"), (503, "Service Unavailable")),
    (EngineFailed, (503, _OURS, "engine_failed"), (503, "api_error"), (503, "Service Unavailable")),
    (GenerationFailed, (500, _OURS), (500, "api_error"), (424, "Generation Error")),
    (StemmaError, (500, _OURS), (500, "api_error"), (500, "Incomplete Generation")),
)
"""(error, OpenAI's words, Anthropic's, TGI's and MindIE's); the first that fits, so subclasses come first."""


def _openai(error: StemmaError, words: _Words) -> dict[str, Any]:
    param = error.param if isinstance(error, InvalidRequest) else None
    return openai_body(str(error), words.kind, param, words.code)


def _anthropic(error: StemmaError, words: _Words) -> dict[str, Any]:
    return {"type": "error", "error": {"type": words.kind, "message": str(error)}}


def _tgi(error: StemmaError, words: _Words) -> dict[str, Any]:
    return {"error": str(error), "error_type": words.kind}


openai_error = ErrorShape("OpenAIError", 1, _openai)
anthropic_error = ErrorShape("AnthropicError", 2, _anthropic)
tgi_error = ErrorShape("TGIError", 3, _tgi)
"""TGI's and MindIE's."""
