"""Each API's own shape of errors. `routes.py` turns what a handler raises into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
"""What proxies log for a client that left; nobody reads the body."""


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return `body` as JSON."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _retry_headers(error: StemmaError) -> dict[str, str]:
    if isinstance(error, OverBudget):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, ShuttingDown | EngineFailed):
        return {"retry-after": str(RETRY_AFTER_DRAIN_S)}
    return {}


_OPENAI: tuple[tuple[type[StemmaError], int, str, str | None], ...] = (
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (NotFound, 404, "invalid_request_error", "not_found"),
    (BodyTooLarge, 413, "invalid_request_error", "request_too_large"),
    (Unauthorized, 401, "invalid_request_error", "invalid_api_key"),
    (Forbidden, 403, "invalid_request_error", "forbidden"),
    (WrongMediaType, 415, "invalid_request_error", "wrong_media_type"),
    (TookTooLong, 408, "invalid_request_error", "timeout"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (Overloaded, 503, "server_error", "queue_full"),
    (RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (ShuttingDown, 503, "server_error", "shutting_down"),
    (EngineFailed, 503, "server_error", "engine_failed"),
    (StemmaError, 500, "server_error", None),
)
"""(error, status, type, code); the first that fits, so subclasses come first."""


def openai_error_body(error: StemmaError) -> tuple[int, dict[str, Any]]:
    """Return (HTTP status, body) as OpenAI's API shapes it."""
    for kind, status, error_type, code in _OPENAI:
        if isinstance(error, kind):
            param = error.param if isinstance(error, InvalidRequest) else None
            detail = {"message": str(error), "type": error_type, "param": param, "code": code}
            return status, {"error": detail}
    raise AssertionError("the table ends with StemmaError")


def openai_error(error: StemmaError) -> Response:
    """Return the response for `error` in OpenAI's shape."""
    status, body = openai_error_body(error)
    return json_response(body, status, _retry_headers(error))


_ANTHROPIC: tuple[tuple[type[StemmaError], int, str], ...] = (
    (UnknownModel, 404, "not_found_error"),
    (NotFound, 404, "not_found_error"),
    (BodyTooLarge, 413, "request_too_large"),
    (Unauthorized, 401, "authentication_error"),
    (Forbidden, 403, "permission_error"),
    (WrongMediaType, 415, "invalid_request_error"),
    (TookTooLong, 408, "timeout_error"),
    (InvalidRequest, 400, "invalid_request_error"),
    (RateLimited, 429, "rate_limit_error"),
    (Overloaded, 529, "overloaded_error"),
    (ShuttingDown, 503, "overloaded_error"),
    (EngineFailed, 503, "api_error"),
    (StemmaError, 500, "api_error"),
)


def anthropic_error_body(error: StemmaError) -> tuple[int, dict[str, Any]]:
    """Return (HTTP status, body) as Anthropic's API shapes it."""
    for kind, status, error_type in _ANTHROPIC:
        if isinstance(error, kind):
            return status, {"type": "error", "error": {"type": error_type, "message": str(error)}}
    raise AssertionError("the table ends with StemmaError")


def anthropic_error(error: StemmaError) -> Response:
    """Return the response for `error` in Anthropic's shape."""
    status, body = anthropic_error_body(error)
    return json_response(body, status, _retry_headers(error))


_TGI: tuple[tuple[type[StemmaError], int, str], ...] = (
    (UnknownModel, 404, "NotFoundError"),
    (NotFound, 404, "NotFoundError"),
    (BodyTooLarge, 413, "Bad Request"),
    (Unauthorized, 401, "Unauthorized"),
    (Forbidden, 403, "Forbidden"),
    (WrongMediaType, 415, "Bad Request"),
    (TookTooLong, 408, "Request Timeout"),
    (InvalidRequest, 422, "Input Validation Error"),
    (Overloaded, 503, "Service Unavailable"),
    (RateLimited, 429, "Too Many Requests"),
    (ShuttingDown, 503, "Service Unavailable"),
    (EngineFailed, 503, "Service Unavailable"),
    (GenerationFailed, 424, "Generation Error"),
    (StemmaError, 500, "Incomplete Generation"),
)


def tgi_error_body(error: StemmaError) -> tuple[int, dict[str, str]]:
    """Return (HTTP status, body) as TGI and MindIE shape it."""
    for kind, status, error_type in _TGI:
        if isinstance(error, kind):
            return status, {"error": str(error), "error_type": error_type}
    raise AssertionError("the table ends with StemmaError")


def tgi_error(error: StemmaError) -> Response:
    """Return the response for `error` in TGI's shape."""
    status, body = tgi_error_body(error)
    return json_response(body, status, _retry_headers(error))
