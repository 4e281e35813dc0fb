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

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import ConfigError
from stemma.server.routing.app import create_proxy_app
from stemma.server.routing.balance import Balance
from stemma.server.routing.prompts import head_of, one_token_body
from stemma.server.routing.relay import (
    Relay,
    Relayed,
    RouteOptions,
    kept_headers,
    nobody_answers,
    path_of,
    read_body,
    relay_client,
)

_log = logging.getLogger(__name__)

ServerGroup = tuple[Sequence[str], Sequence[str]]
"""URLs of prefill servers and of decode servers that share a pool."""
_NOBODY = 503
_GROUP_HEAD = 256
"""Bytes of the beginning that choose a group: few, so that the second round of a dialogue that was sent as
plain text finds the pool of its first. Within a group the pool has what another server computed."""


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
        relay: Relay,
    ) -> None:
        if not prefills or not decodes:
            raise ConfigError("name at least one prefill server and one decode server")
        self.prefills = tuple(url.rstrip("/") for url in prefills)
        self.decodes = tuple(url.rstrip("/") for url in decodes)
        self.stats = RouteStats()
        self.relay = relay
        self._prefill_balance = Balance(self.prefills)
        self._decode_balance = Balance(self.decodes)

    async def generate(self, request: Request, content: bytes) -> Response:
        """Prefill on one server, decode on another. A client that leaves ends the work on both."""
        self.stats.num_requests += 1
        headers = kept_headers(request)
        body = await read_body(request, content)
        head = head_of(body)
        if body:
            await self._prefill(request.scope["path"], body, headers, head)
        answer = await self._first_answer(request, content, headers, head)
        if answer is None:
            return nobody_answers()
        return answer

    def under_way(self) -> dict[str, int]:
        """Return the number of requests that each server works on."""
        return self._prefill_balance.under_way() | self._decode_balance.under_way()

    async def _prefill(self, path: str, body: dict[str, Any], headers: dict[str, str], head: bytes) -> None:
        """Have the prompt computed and put into the pool; a failure only costs time."""
        content = orjson.dumps(one_token_body(path, body))
        path = path.removesuffix("_stream")  # where it is computed without streaming
        for url in self._prefill_balance.order(head):
            self._prefill_balance.begin(url)
            try:
                answer = await self.relay.client.post(url + path, content=content, headers=headers)
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
                answer = await self.relay.ask(url + path_of(request), content, headers)
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


class Groups:
    """Servers that share a pool form a group, and a request stays within one.

    The beginning of the prompt says within which, unless that is busy; if nobody there answers, the next one
    is tried.
    """

    def __init__(self, groups: Sequence[ServerGroup], relay: Relay) -> None:
        """Raises ConfigError if there is no group, or one lacks either kind of server."""
        routers = [Router(prefills, decodes, relay) for prefills, decodes in groups]
        if not routers:
            raise ConfigError("name at least one prefill server and one decode server")
        self.relay = relay
        self._routers = {router.decodes[0]: router for router in routers}
        self._balance = Balance(tuple(self._routers))

    async def generate(self, request: Request, content: bytes) -> Response:
        """Prefill on one server of a group, decode on another. A client that leaves ends the work on both."""
        answer = nobody_answers()
        head = head_of(await read_body(request, content))[:_GROUP_HEAD]
        for name in self._balance.order(head):
            ended = partial(self._balance.end, name)
            self._balance.begin(name)
            try:
                answer = await self._routers[name].generate(request, content)
            except BaseException:
                ended()
                raise
            if isinstance(answer, Relayed):
                answer.when_over = _both(answer.when_over, ended)
                return answer
            ended()
            if answer.status_code != _NOBODY:
                break
        return answer

    def describe(self) -> dict[str, Any]:
        """Return the counters since the start, and the requests that each server works on."""
        broken = self.relay.num_broken_streams
        under_way: dict[str, int] = {}
        counts: Counter[str] = Counter()
        for router in self._routers.values():
            under_way |= router.under_way()
            counts.update(vars(router.stats))
        counts["num_decode_failures"] += broken
        return {"under_way": under_way, **counts, "num_broken_streams": broken}

    @property
    def urls(self) -> tuple[str, ...]:
        """All servers, those first that answer requests that generate nothing."""
        routers = self._routers.values()
        decodes = [url for router in routers for url in router.decodes]
        return (*decodes, *(url for router in routers for url in router.prefills))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Nothing runs beside the requests."""
        yield


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call


def create_route_app(
    prefills: Sequence[str],
    decodes: Sequence[str],
    client: httpx.AsyncClient | None = None,
    options: RouteOptions | None = None,
) -> FastAPI:
    """Return the proxy in front of servers with one pool. Raises ConfigError if one of the lists is empty."""
    return create_groups_app([(prefills, decodes)], client, options)


def create_groups_app(
    groups: Sequence[ServerGroup],
    client: httpx.AsyncClient | None = None,
    options: RouteOptions | None = None,
) -> FastAPI:
    """Return the proxy in front of several groups. Raises ConfigError if one lacks either kind of server."""
    options = options or RouteOptions()
    return create_proxy_app(Groups(groups, Relay(client or relay_client(), options)), options)
