"""The entrance of the application: every request gets its id and its caller; malformed headers are 400."""

from __future__ import annotations

import re
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stemma.server.door.access import host_name
from stemma.server.door.caller import Caller, begin_call
from stemma.server.errors import json_response, openai_body
from stemma.server.transport.outgoing import send_in_pieces

IS_HEAD = "stemma.head"
"""In a request's scope: GET stands for HEAD, so only the head of the answer is sent."""
_MAX_LENGTH_DIGITS = 18

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_ANTHROPIC = "/v1/messages"
"""Where answers have their id in `request-id` as well."""
_ONCE = (b"host", b"content-length", b"authorization", b"origin", b"x-api-key")


class Entrance:
    """ASGI middleware around everything.

    `Host`, `Content-Length` and keys come at most once, and well-formed. `x-request-id` is taken from the
    request or made, and sent back. What the request took from budgets is returned as the last bytes of its
    answer leave.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 (ASGI's own)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        one = Caller(_given_id(scope) or f"req_{uuid4().hex}")
        begin_call(one)
        mine = [(b"x-request-id", one.x_request_id.encode())]
        if scope["path"].startswith(_ANTHROPIC):
            mine.append((b"request-id", mine[0][1]))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *mine]
            await send_in_pieces(send, message)

        try:
            if wrong := _wrong_header(scope):
                await _refusal(wrong)(scope, receive, named)
            else:
                # HEAD answers where GET does; uvicorn, which knows better, sends no body.
                is_head = scope["method"] == "HEAD"
                inner = {**scope, "method": "GET", IS_HEAD: True} if is_head else scope
                await self._app(inner, receive, named)
        finally:
            one.holding.close()


def _refusal(wrong: str) -> ASGIApp:
    message = f"the request has {wrong} header"
    return json_response(openai_body(message, "invalid_request_error", code="malformed_header"), 400)


def _given_id(scope: Scope) -> str | None:
    """Return the client's `x-request-id`, if there is one that can stand in a log."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            return text if _ID.fullmatch(text) else None
    return None


def _wrong_header(scope: Scope) -> str | None:
    seen: set[bytes] = set()
    for name, value in scope["headers"]:
        if name in _ONCE:
            if name in seen:
                return f"more than one {name.decode()}"
            seen.add(name)
        if name == b"host" and value and host_name(value.decode("latin-1")) is None:
            return "a malformed host"
        is_count = value.isascii() and value.isdigit() and len(value) <= _MAX_LENGTH_DIGITS
        if name == b"content-length" and not is_count:
            return "a malformed content-length"
    if b"host" not in seen and scope.get("http_version") == "1.1":
        return "no host"
    return None
