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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import ConfigError
from stemma.server.access import has_key
from stemma.server.errors import json_response
from stemma.server.routing.balance import Balance, head_of
from stemma.server.routing.relay import (
    CONNECT_TIMEOUT_S,
    GENERATING,
    READ_TIMEOUT_S,
    Relay,
    Relayed,
    RouteOptions,
    json_object,
    kept_headers,
    nobody_answers,
    path_of,
)
from stemma.server.transport.headers import HeaderGuard

_log = logging.getLogger(__name__)

_PREFILL_PATHS = {"/generate_stream": "/generate"}
"""Where a prompt is computed without streaming."""


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
        self._relay = Relay(client, options)
        self._prefill_balance = Balance(self.prefills)
        self._decode_balance = Balance(self.decodes)

    async def generate(self, request: Request) -> Response:
        """Prefill on one server, decode on another. A client that leaves ends the work on both."""
        return await self._relay.answered(request, self._generate)

    async def pass_on(self, request: Request) -> Response:
        """Send any other request to the first server that answers."""
        return await self._relay.answered(request, self._pass_on)

    async def _generate(self, request: Request, content: bytes) -> Response:
        self.stats.num_requests += 1
        headers = kept_headers(request)
        body = await asyncio.to_thread(json_object, content)
        head = head_of(body)
        await self._prefill(request.scope["path"], body, headers, head)
        answer = await self._first_answer(request, content, headers, head)
        if answer is None:
            return nobody_answers()
        return answer

    def counts(self) -> dict[str, int]:
        """Return the counters since the start."""
        broken = self._relay.num_broken_streams
        counts = {**vars(self.stats), "num_broken_streams": broken}
        counts["num_decode_failures"] += broken
        return counts

    async def is_healthy(self, url: str) -> bool:
        """Return whether a server says that it serves."""
        return await self._relay.is_healthy(url)

    def under_way(self) -> dict[str, int]:
        """Return the number of requests that each server works on."""
        return self._prefill_balance.under_way() | self._decode_balance.under_way()

    async def _pass_on(self, request: Request, content: bytes) -> Response:
        return await self._relay.first_of(request, content, (*self.decodes, *self.prefills))

    async def _prefill(self, path: str, body: dict[str, Any], headers: dict[str, str], head: bytes) -> None:
        """Have the prompt computed and put into the pool; a failure only costs time."""
        content = orjson.dumps(one_token_body(path, body))
        path = _PREFILL_PATHS.get(path, path)
        for url in self._prefill_balance.order(head):
            self._prefill_balance.begin(url)
            try:
                answer = await self._relay.client.post(url + path, content=content, headers=headers)
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
                answer = await self._relay.ask(url + path_of(request), content, headers)
            except httpx.HTTPError as error:
                balance.end(url)
                if not is_fallback:
                    self.stats.num_decode_failures += 1
                _log.warning("decode server %s: %s", url, str(error) or type(error).__name__)
                continue
            except BaseException:  # the client went away
                balance.end(url)
                raise
            if isinstance(answer, Relayed):
                answer.when_over = partial(balance.end, url)
            else:
                balance.end(url)
            self.stats.num_fallbacks += is_fallback
            return answer
        return None


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
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    http = client or httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(max_connections=None))
    options = options or RouteOptions()
    router = Router(prefills, decodes, http, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await http.aclose()

    async def health(request: Request) -> Response:
        """Whether any server answers; who has the key sees each of them, and what happened so far."""
        servers = {url: await router.is_healthy(url) for url in (*router.prefills, *router.decodes)}
        status = "ok" if any(servers.values()) else "down"
        body: dict[str, Any] = {"status": status}
        if has_key(request, options.admin_key):
            body |= {"servers": servers, "under_way": router.under_way(), **router.counts()}
        return json_response(body, 200 if status == "ok" else 503)

    app = FastAPI(title="Stemma route", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.add_middleware(HeaderGuard)
    app.state.router = router
    app.add_route("/health", health, methods=["GET"])
    for path in GENERATING:
        app.add_route(path, router.generate, methods=["POST"])
    app.add_route("/{path:path}", router.pass_on, methods=["GET", "POST", "DELETE", "PUT"])
    return app
