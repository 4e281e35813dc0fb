"""A proxy in front of prefill and decode servers: each request goes first to one, then to the other.

The prefill server gets the request with an output of one token. When it answers, the KV of the whole prompt
is in the pool that both share. Then a decode server gets the request as it came, finds the prompt in the
pool and generates; its answer passes through unchanged.

The first step affects only speed, not correctness. If no prefill server answers, the decode server computes
the prompt. If a decode server is down or fails before the client has received a byte, the next one gets the
request, and finally a prefill server, which can also decode. If a stream breaks off in the middle, the answer
ends with an error event: it can't be continued, and must not look finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stemma.config.settings import ServerSettings
from stemma.errors import ClientDisconnected, ConfigError, InvalidRequest, StemmaError
from stemma.server.access import Access, has_key
from stemma.server.balance import Balance, head_of
from stemma.server.body import limited_chunks
from stemma.server.disconnect import unless_disconnected
from stemma.server.errors import STATUS_CLIENT_CLOSED, json_response, openai_error
from stemma.server.headers import HeaderGuard
from stemma.server.json_input import parse_json
from stemma.server.planes import Plane, plane_of

_log = logging.getLogger(__name__)

_GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream", "/")
_PREFILL_PATHS = {"/generate_stream": "/generate"}
"""Where a prompt is computed without streaming."""
_CONNECT_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 600.0
_KEPT_HEADERS = ("authorization", "content-type", "accept")


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """What the proxy allows by itself; keys of requests are for the servers to check."""

    host: str = "127.0.0.1"
    """Address it listens on."""
    max_body_bytes: int = 64 * 2**20
    admin_key: str | None = None
    """Shows the servers' URLs on `/health`."""


class RouteStats:
    """Counters since the start, for `/health`."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_prefill_failures = 0
        """Number of failed attempts at a prefill server."""
        self.num_decode_failures = 0
        """Number of attempts at a decode server that failed or broke off."""
        self.num_fallbacks = 0
        """Requests that a prefill server answered in place of a decode server."""
        self.num_broken_streams = 0


class Router:
    """Chooses servers by the beginning of the prompt and by load, and tries the next if one fails."""

    def __init__(
        self,
        prefills: Sequence[str],
        decodes: Sequence[str],
        client: httpx.AsyncClient,
        options: RouteOptions,
    ) -> None:
        if not prefills or not decodes:
            raise ConfigError("name at least one prefill server and one decode server")
        self.prefills = tuple(url.rstrip("/") for url in prefills)
        self.decodes = tuple(url.rstrip("/") for url in decodes)
        self.stats = RouteStats()
        self._client = client
        self._options = options
        self._access = Access(ServerSettings(host=options.host))
        self._prefill_balance = Balance(self.prefills)
        self._decode_balance = Balance(self.decodes)

    async def generate(self, request: Request) -> Response:
        """Prefill on one server, decode on another. A client that leaves ends the work on both."""
        return await self._answered(request, self._generate)

    async def pass_on(self, request: Request) -> Response:
        """Send any other request to the first server that answers."""
        return await self._answered(request, self._pass_on)

    async def _answered(
        self, request: Request, work: Callable[[Request, bytes], Coroutine[Any, Any, Response]]
    ) -> Response:
        try:
            if "authorization" not in request.headers:
                self._access.check(request)
            chunks = limited_chunks(request, self._options.max_body_bytes)
            content = b"".join([chunk async for chunk in chunks])
            return await unless_disconnected(request, work(request, content))
        except ClientDisconnected:
            return Response(status_code=STATUS_CLIENT_CLOSED)
        except StemmaError as error:
            return openai_error(error)

    async def _generate(self, request: Request, content: bytes) -> Response:
        self.stats.num_requests += 1
        headers = _kept(request)
        body = await asyncio.to_thread(_object, content)
        head = head_of(body)
        await self._prefill(request.scope["path"], body, headers, head)
        answer = await self._first_answer(request, content, headers, head)
        if answer is None:
            message = "no prefill or decode server answers"
            return json_response({"error": {"message": message, "type": "server_error"}}, 503)
        return answer

    def under_way(self) -> dict[str, int]:
        """Return the number of requests that each server works on."""
        return self._prefill_balance.under_way() | self._decode_balance.under_way()

    async def _pass_on(self, request: Request, content: bytes) -> Response:
        headers, path = _kept(request), _path_of(request)
        for url in (*self.decodes, *self.prefills):
            try:
                upstream = await self._client.request(
                    request.method, url + path, content=content, headers=headers
                )
            except httpx.HTTPError as error:
                _log.warning("%s: %s", url, str(error) or type(error).__name__)
                continue
            return Response(upstream.content, upstream.status_code, _content_type(upstream))
        message = "no prefill or decode server answers"
        return json_response({"error": {"message": message, "type": "server_error"}}, 503)

    async def _prefill(self, path: str, body: dict[str, Any], headers: dict[str, str], head: bytes) -> None:
        """Have the prompt computed and put into the pool; a failure only costs time."""
        content = orjson.dumps(one_token_body(path, body))
        path = _PREFILL_PATHS.get(path, path)
        for url in self._prefill_balance.order(head):
            self._prefill_balance.begin(url)
            try:
                answer = await self._client.post(url + path, content=content, headers=headers)
            except httpx.HTTPError as error:
                self.stats.num_prefill_failures += 1
                _log.warning("prefill server %s: %s", url, str(error) or type(error).__name__)
                continue
            finally:
                self._prefill_balance.end(url)
            if answer.status_code < 500:
                return  # the decode server reports what is wrong with the request
            self.stats.num_prefill_failures += 1

    async def _first_answer(
        self, request: Request, content: bytes, headers: dict[str, str], head: bytes
    ) -> Response | None:
        tries = [(self._decode_balance, url) for url in self._decode_balance.order(head)]
        tries += [(self._prefill_balance, url) for url in self._prefill_balance.order(head)]
        for balance, url in tries:
            is_fallback = balance is self._prefill_balance
            balance.begin(url)
            try:
                answer = await self._ask(url + _path_of(request), content, headers)
            except httpx.HTTPError as error:
                balance.end(url)
                if not is_fallback:
                    self.stats.num_decode_failures += 1
                _log.warning("decode server %s: %s", url, str(error) or type(error).__name__)
                continue
            except BaseException:  # the client went away
                balance.end(url)
                raise
            if isinstance(answer, _Relayed):
                answer.when_over = partial(balance.end, url)
            else:
                balance.end(url)
            self.stats.num_fallbacks += is_fallback
            return answer
        return None

    async def _ask(self, url: str, content: bytes, headers: dict[str, str]) -> Response:
        """Return the answer; raise HTTPError if none comes, or a whole one breaks off."""
        upstream = await self._client.send(
            self._client.build_request("POST", url, content=content, headers=headers), stream=True
        )
        if not upstream.headers.get("content-type", "").startswith("text/event-stream"):
            try:
                await upstream.aread()
            finally:
                await upstream.aclose()
            return Response(upstream.content, upstream.status_code, _content_type(upstream))
        chunks = upstream.aiter_raw()
        try:
            # Nothing is sent to the client before the first event is here: until then another server can try.
            first = await anext(chunks, b"")
        except httpx.HTTPError:
            await upstream.aclose()
            raise
        return _Relayed(self._stream(upstream, first, chunks), upstream.status_code, _content_type(upstream))

    async def _stream(
        self, upstream: httpx.Response, first: bytes, rest: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        try:
            yield first
            async for chunk in rest:
                yield chunk
        except httpx.HTTPError as error:
            self.stats.num_decode_failures += 1
            self.stats.num_broken_streams += 1
            _log.warning("decode server broke off: %s", str(error) or type(error).__name__)
            message = "the server that generated this answer went away; what came so far is incomplete"
            event = {"error": {"message": message, "type": "server_error", "code": "stream_broken"}}
            yield b"\n\ndata: " + orjson.dumps(event) + b"\n\n"
        finally:
            await upstream.aclose()


class _Relayed(StreamingResponse):
    """A stream passed on; `when_over` is called once it ended, however it did."""

    when_over: Callable[[], None] = staticmethod(lambda: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.when_over()


def one_token_body(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request that computes the same prompt and generates one token, without streaming."""
    short = {**body, "stream": False}
    for name in ("stream_options", "logprobs", "top_logprobs", "best_of", "prompt_logprobs", "details"):
        short.pop(name, None)
    if "inputs" in body:
        parameters = body.get("parameters") or {}
        dropped = ("details", "decoder_input_details")
        kept = {name: value for name, value in parameters.items() if name not in dropped}
        return {**short, "parameters": {**kept, "max_new_tokens": 1}}
    short["n"] = 1
    short["max_completion_tokens" if "max_completion_tokens" in short else "max_tokens"] = 1
    short.pop("min_tokens", None)
    return short


def create_route_app(
    prefills: Sequence[str],
    decodes: Sequence[str],
    client: httpx.AsyncClient | None = None,
    options: RouteOptions | None = None,
) -> FastAPI:
    """Return the proxy. Raises ConfigError if one of the lists is empty."""
    timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    http = client or httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(max_connections=None))
    options = options or RouteOptions()
    router = Router(prefills, decodes, http, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await http.aclose()

    async def health(request: Request) -> Response:
        """Whether any server answers; who has the key sees each of them, and what happened so far."""
        servers = {url: await _is_healthy(http, url) for url in (*router.prefills, *router.decodes)}
        status = "ok" if any(servers.values()) else "down"
        body: dict[str, Any] = {"status": status}
        if has_key(request, options.admin_key):
            body |= {"servers": servers, "under_way": router.under_way(), **vars(router.stats)}
        return json_response(body, 200 if status == "ok" else 503)

    app = FastAPI(title="Stemma route", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.add_middleware(HeaderGuard)
    app.state.router = router
    app.add_route("/health", health, methods=["GET"])
    for path in _GENERATING:
        app.add_route(path, router.generate, methods=["POST"])
    app.add_route("/{path:path}", router.pass_on, methods=["GET", "POST", "DELETE", "PUT"])
    return app


async def _is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health", timeout=_CONNECT_TIMEOUT_S)).status_code == 200
    except httpx.HTTPError:
        return False


def _kept(request: Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _KEPT_HEADERS if name in request.headers}


def _path_of(request: Request) -> str:
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


def _content_type(upstream: httpx.Response) -> dict[str, str]:
    names = ("content-type", "retry-after")
    return {name: upstream.headers[name] for name in names if name in upstream.headers}


def _object(content: bytes) -> dict[str, Any]:
    parsed = parse_json(content)
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    parameters = parsed.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest("parameters: must be an object", param="parameters")
    return parsed
