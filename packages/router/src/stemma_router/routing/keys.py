"""Keys come first: a proxy reads no body before it knows that the servers take the request's key.

A refusal counts once a second server repeats it: one that has lost its keys refuses everybody.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import httpx
from starlette.requests import Request
from starlette.responses import Response

from stemma.server.door.access import Access
from stemma.server.door.caller import caller
from stemma.server.door.sockets import note_key
from stemma.server.errors import json_response

_log = logging.getLogger(__name__)
GOOD_FOR_S = 30.0
"""How long a key needn't be asked for again; the server itself checks it with every request."""
BAD_FOR_S = 5.0
MAX_KNOWN = 4096
_ASK_TIMEOUT_S = 5.0
_HEADERS = ("authorization", "x-api-key")
_REFUSALS = (401, 403)


class Keys(Protocol):
    """Who may send a body."""

    async def refusal(self, request: Request) -> Response | None:
        """Return the answer for who may not. Raises Unauthorized or Forbidden, or returns None for others."""


class OwnKeys:
    """The servers' own settings, where the proxy has them."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def refusal(self, request: Request) -> Response | None:
        """Raise what the servers' settings refuse."""
        self._access.check(request)
        return None


class AskedKeys:
    """Asks a server with the key, and remembers the answer by the key's digest. For one event loop."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        urls: Callable[[], Sequence[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`urls` returns the servers, those first that can be asked now."""
        self._client = client
        self._urls = urls
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, tuple[float, Response | None]] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Response | None]] = {}

    async def refusal(self, request: Request) -> Response | None:
        """Return the server's refusal, or None; requests with the same key wait for one question."""
        given = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        digest = self._digest(given)
        caller().tenant = digest.hex() if given else ""
        answer = await self._answer(digest, given)
        if given and answer is None:
            note_key(request.scope)
        return answer

    async def _answer(self, digest: bytes, given: dict[str, str]) -> Response | None:
        until, answer = self._known.get(digest, (0.0, None))
        if self._clock() < until:
            return answer
        asking = self._asking.get(digest)
        if asking is None:
            asking = self._asking[digest] = asyncio.ensure_future(self._ask(digest, given))
            asking.add_done_callback(lambda _: self._asking.pop(digest, None))
        return await asyncio.shield(asking)

    def _digest(self, given: dict[str, str]) -> bytes:
        text = "\0".join(given.get(name, "") for name in _HEADERS)
        return hashlib.blake2b(text.encode("latin-1"), key=self._secret, digest_size=16).digest()

    async def _ask(self, digest: bytes, given: dict[str, str]) -> Response | None:
        refusal: httpx.Response | None = None
        for url in self._urls():
            try:
                answer = await self._client.get(f"{url}/v1/models", headers=given, timeout=_ASK_TIMEOUT_S)
            except httpx.HTTPError as error:
                _log.warning("%s: %s", url, str(error) or type(error).__name__)
                continue
            if answer.status_code >= 500:
                continue
            if answer.status_code not in _REFUSALS:
                return self._note(digest, GOOD_FOR_S, None)
            if refusal is not None:
                break
            refusal = answer
        if refusal is None:
            return json_response({"error": {"message": "no server answers", "type": "server_error"}}, 503)
        kind = refusal.headers.get("content-type")
        return self._note(digest, BAD_FOR_S, Response(refusal.content, refusal.status_code, media_type=kind))

    def _note(self, digest: bytes, for_s: float, answer: Response | None) -> Response | None:
        self._known[digest] = (self._clock() + for_s, answer)
        self._known.move_to_end(digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return answer
