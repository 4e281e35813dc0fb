"""Answers malformed headers with 400 before the application reads them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from stemma.server.access import host_name
from stemma.server.errors import json_response

_MAX_LENGTH_DIGITS = 18


class HeaderGuard:
    """ASGI middleware: `Host`, `Content-Length` and `Authorization` come at most once, and well-formed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 (ASGI's own)
        if scope["type"] == "http" and (wrong := _wrong_header(scope)):
            detail = {
                "message": f"the request has a malformed {wrong} header",
                "type": "invalid_request_error",
                "param": None,
                "code": "malformed_header",
            }
            await json_response({"error": detail}, 400)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _wrong_header(scope: Scope) -> str | None:
    seen: set[bytes] = set()
    for name, value in scope["headers"]:
        if name in (b"host", b"content-length", b"authorization", b"origin", b"x-api-key"):
            if name in seen:
                return str(name, "ascii")
            seen.add(name)
        if name == b"host" and value and host_name(value.decode("latin-1")) is None:
            return "host"
        is_count = value.isascii() and value.isdigit() and len(value) <= _MAX_LENGTH_DIGITS
        if name == b"content-length" and not is_count:
            return "content-length"
    return None
