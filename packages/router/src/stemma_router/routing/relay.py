"""Relay of both proxies: pass a request on to a server, and its answer back, as it comes.

Until the first bytes of a stream, or the whole of another answer, are here nothing is sent to the client, so
another server can still be tried. Afterwards a stream that breaks off ends with an error event: it can't be
continued, and must not look finished. An answer that is too large to be held here, or for which the budget
has no room, is passed on as it comes, too; if it breaks off, so does the client's connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import orjson
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stemma.budgets import Holding
from stemma.config.server_settings import ServerSettings
from stemma.errors import ClientDisconnected, InvalidRequest, OverBudget, StemmaError
from stemma.http import async_http_client
from stemma.server.door.access import Access, is_loopback
from stemma.server.door.caller import caller
from stemma.server.door.ledger import shared
from stemma.server.errors import STATUS_CLIENT_CLOSED, json_response, openai_error
from stemma.server.observe.lately import Lately
from stemma.server.observe.refusals import Refusals
from stemma.server.schemas.json_input import parse_json
from stemma.server.transport.incoming import limited_chunks, unless_disconnected
from stemma.server.transport.planes import Plane, plane_of
from stemma_router.routing.keys import AskedKeys, Keys, OwnKeys
from stemma_router.routing.metrics import counters
from stemma_router.routing.refused import noted, route_of

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 3600.0
"""Without a byte of an answer. Servers that hang are found by checks, long before."""
_IDLE_S = 2.5
"""How long an idle connection to a server is used again: vLLM closes it after 5 s, and what is sent to it
then would count as a failure of that server."""
_OTHER_TIMEOUT_S = 30.0
"""For an answer to a request that generates nothing."""
MOST_HELD_BYTES = 4 * 2**20
"""Of an answer that isn't a stream: a larger one is passed on before its end is here."""
_MOST_BEGUN = 2
NOT_FOUND = 404
BINARY_HEADER = "inference-header-content-length"
"""Where JSON ends in a body of Triton's binary tensors."""
_KEPT_HEADERS = frozenset(
    {
        "authorization",
        "x-api-key",
        "content-type",
        "accept",
        "anthropic-version",
        "anthropic-beta",
        BINARY_HEADER,
        "traceparent",
        "tracestate",
        "x-stemma-explain",
    }
)
CACHED_HEADER = "x-stemma-cached-tokens"
_KEPT_ANSWER_HEADERS = frozenset({"content-type", "retry-after", BINARY_HEADER, CACHED_HEADER})


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Limits that a proxy sets by itself; keys of requests are for the servers to check."""

    host: str = "127.0.0.1"
    """Address it listens on."""
    max_body_bytes: int = 64 * 2**20
    admin_key: str | None = None
    """Shows the servers' URLs on `/health`."""
    body_memory: int = 512 * 2**20
    """Bytes of bodies that are passed on at once; one key may hold half of them."""
    answer_memory: int = 512 * 2**20
    """Bytes of whole answers that are held until their clients have read them; one key may hold half."""
    access: Access | None = None
    """The servers' own keys, where they are known; None: a server is asked."""


class BrokenOff(StemmaError):
    """A server broke off an answer that isn't a stream: the client's connection ends unfinished, too."""


class Relayed(StreamingResponse):
    """An answer passed on as it comes; `when_over` is called once it ended, however it did."""

    when_over: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        upstream: httpx.Response,
        first: bytes,
        rest: AsyncIterator[bytes],
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(self._passed_on(), upstream.status_code, _answer_headers(upstream))
        self.first = first
        self.is_stream = is_stream_of_events(upstream)
        self.is_broken = False
        """The server broke off; the client was told so."""
        self._on_broken = on_broken
        self._upstream = upstream
        self._rest = rest
        self._reading: asyncio.Timeout | None = None
        self._is_lost = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.when_over()

    async def drop(self) -> None:
        """Close the connection to the server; nothing is passed on."""
        await self._upstream.aclose()

    def lose(self) -> None:
        """Break off: the server is gone, though its connection may be open still."""
        self._is_lost = True
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(asyncio.get_running_loop().time())

    async def _passed_on(self) -> AsyncIterator[bytes]:
        try:
            yield self.first
            while (chunk := await self._next()) is not None:
                yield chunk
        except (httpx.HTTPError, TimeoutError) as error:
            self.is_broken = True
            self._on_broken()
            _log.warning("a server broke off: %s", str(error) or type(error).__name__)
            if not self.is_stream:
                raise BrokenOff("the server that generated this answer went away") from error
            message = "the server that generated this answer went away; what came so far is incomplete"
            event = {"error": {"message": message, "type": "server_error", "code": "stream_broken"}}
            yield b"\n\ndata: " + orjson.dumps(event) + b"\n\n"
        finally:
            await self._upstream.aclose()

    async def _next(self) -> bytes | None:
        """Return the next bytes, or None at the end. Raises TimeoutError if the server is lost."""
        if self._is_lost:
            raise TimeoutError("it fell silent")
        async with asyncio.timeout(None) as self._reading:
            return await anext(self._rest, None)


class Relay:
    """Passes requests on with one HTTP client."""

    def __init__(self, client: httpx.AsyncClient, options: RouteOptions) -> None:
        self.client = client
        self.num_broken_streams = 0
        self.num_refused = 0
        """Requests that were answered here: without a key, malformed, or beyond a budget."""
        self.lately = Lately()
        self.refusals = Refusals(self.lately, logs=False)
        self._options = options
        self._access = Access(ServerSettings(host=options.host, admin_key=options.admin_key))
        self.bodies = shared("body_bytes", "bytes of request bodies", options.body_memory)
        self.answers = shared("answer_bytes", "bytes of answers", options.answer_memory)
        self._keys: Keys | None = None if options.access is None else OwnKeys(options.access)

    def ask_for_keys(self, urls: Callable[[], Sequence[str]]) -> None:
        """Ask these servers for keys, where the proxy doesn't know them."""
        self._keys = self._keys or AskedKeys(self.client, urls)

    async def answered(
        self, request: Request, work: Callable[[Request, bytes], Coroutine[Any, Any, Response]]
    ) -> Response:
        """Check who asks, read the body and do the work on it.

        Its errors, and a client that leaves, become responses. A body counts until its answer begins.
        """
        held = Holding()
        try:
            self._access.check_page(request)
            if not {"authorization", "x-api-key"} & set(request.headers):
                self._access.check(request)
            if self._keys is not None and (refusal := await self._keys.refusal(request)) is not None:
                self.num_refused += 1
                return noted(self.refusals, request, refusal)
            content = await self._read(request, held)
            answer = await unless_disconnected(request, work(request, content))
            return noted(self.refusals, request, answer)
        except ClientDisconnected:
            return Response(status_code=STATUS_CLIENT_CLOSED)
        except StemmaError as error:
            self.num_refused += 1
            answer = openai_error(error)
            self.refusals.note(request, error, route_of(request), answer.status_code)
            return answer
        finally:
            held.close()

    async def _read(self, request: Request, held: Holding) -> bytes:
        owner = caller().tenant
        limit = min(self._options.max_body_bytes, self.bodies.most(owner))
        chunks = []
        async for chunk in limited_chunks(request, limit):
            held.take(self.bodies, len(chunk), owner)
            chunks.append(chunk)
        return b"".join(chunks)

    async def ask(
        self,
        url: str,
        content: bytes,
        headers: dict[str, str],
        *,
        method: str = "POST",
        extensions: dict[str, Any] | None = None,
    ) -> Response:
        """Return the answer; raise HTTPError if none comes, or it breaks off before any of it is passed on.

        `extensions` are for the client's transport.
        """
        request = self.client.build_request(
            method, url, content=content, headers=headers, extensions=extensions
        )
        upstream = await self.client.send(request, stream=True)
        is_stream = is_stream_of_events(upstream)
        chunks = upstream.aiter_raw() if is_stream else upstream.aiter_bytes()
        try:
            first, is_whole = (await anext(chunks, b""), False) if is_stream else await self._held(chunks)
        except BaseException:  # it broke off, or the client left
            await upstream.aclose()
            raise
        if is_whole:
            await upstream.aclose()
            return Response(first, upstream.status_code, _answer_headers(upstream))
        return Relayed(upstream, first, chunks, self._note_broken)

    async def _held(self, chunks: AsyncIterator[bytes]) -> tuple[bytes, bool]:
        """Return as much of an answer as may be held here until it has left, and whether that is all."""
        one, held, num_bytes = caller(), [], 0
        async for chunk in chunks:
            held.append(chunk)
            num_bytes += len(chunk)
            try:
                one.holding.take(self.answers, len(chunk), one.tenant)
            except OverBudget:
                return b"".join(held), False
            if num_bytes > MOST_HELD_BYTES:
                return b"".join(held), False
        return b"".join(held), True

    async def first_of(self, request: Request, content: bytes, urls: tuple[str, ...]) -> Response:
        """Send a request that generates nothing to the first server that answers it in time.

        One that hasn't the thing isn't the last. What a server may have begun goes to one other at most.
        """
        headers, path = kept_headers(request), path_of(request)
        answer, num_begun = nobody_answers(), 0
        for url in urls:
            try:
                async with asyncio.timeout(_OTHER_TIMEOUT_S):
                    answer = await self.ask(url + path, content, headers, method=request.method)
            except (httpx.HTTPError, TimeoutError) as error:
                _log.warning("%s: %s", url, str(error) or type(error).__name__)
                num_begun += not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if num_begun == _MOST_BEGUN:
                    break
                continue
            if answer.status_code != NOT_FOUND:
                break
            if isinstance(answer, Relayed):
                await answer.drop()
                answer = Response(status_code=NOT_FOUND)
        return answer

    def check_operator(self, request: Request, admin_key: str | None) -> None:
        """Raise unless `request` carries the admin key or, if there is none, comes from this machine."""
        self._access.check_page(request)
        if admin_key is not None or not is_loopback(self._options.host):
            self._access.check_admin(request)

    def metrics(self) -> Iterable[Metric]:
        """Return what is counted here."""
        return counters(
            {
                "refused": ("Requests refused before they reached a server", self.num_refused),
                "broken_streams": ("Streams that servers broke off", self.num_broken_streams),
            }
        )

    def _note_broken(self) -> None:
        self.num_broken_streams += 1


def relay_client() -> httpx.AsyncClient:
    """Return the client that a proxy asks its servers with."""
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S)
    return async_http_client(timeout=timeout, limits=limits)


def nobody_answers() -> Response:
    """Return the response where no server could be reached."""
    return json_response({"error": {"message": "no server answers", "type": "server_error"}}, 503)


def kept_headers(request: Request) -> dict[str, str]:
    """Return the headers that are passed on."""
    kept = {name: value for name, value in request.headers.items() if name in _KEPT_HEADERS}
    return {**kept, "x-request-id": caller().x_request_id}


def path_of(request: Request) -> str:
    """Return path and query as they are sent on. Raises InvalidRequest for paths that aren't for clients.

    A path that a server might read in another way than this proxy is refused: dot segments, empty segments,
    backslashes, and what is still encoded after decoding once.
    """
    path: str = request.scope["path"]
    segments = path.split("/")[1:]
    is_odd = not path.isprintable() or "\\" in path or "%" in path or not path.startswith("/")
    if is_odd or any(segment in (".", "..") for segment in segments) or "" in segments[:-1]:
        raise InvalidRequest("this path isn't passed on")
    if {plane_of(path), plane_of(path.lower())} != {Plane.BUSINESS}:
        raise InvalidRequest("this path isn't passed on: ask the server itself")
    query = request.scope["query_string"].decode("latin-1")
    return f"{quote(path)}?{query}" if query else quote(path)


def is_stream_of_events(upstream: httpx.Response) -> bool:
    """Return whether an answer is a stream of events."""
    return str(upstream.headers.get("content-type", "")).startswith("text/event-stream")


def _answer_headers(upstream: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in upstream.headers.items() if name in _KEPT_ANSWER_HEADERS}


async def read_body(request: Request, content: bytes) -> dict[str, Any]:
    """Return a request's body; an empty one for Triton's binary tensors. Raises InvalidRequest."""
    if BINARY_HEADER in request.headers:
        return {}
    return await asyncio.to_thread(_json_object, content)


def _json_object(content: bytes) -> dict[str, Any]:
    parsed = parse_json(content)
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    parameters = parsed.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest("parameters: must be an object", param="parameters")
    return parsed
