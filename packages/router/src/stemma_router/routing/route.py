"""A proxy in front of prefill and decode servers: each request goes first to one, then to the other.

The prefill server gets the request with an output of one token. When it answers, the KV of the whole prompt
is in the pool that both share. Then a decode server gets the request as it came, finds the prompt in the
pool and generates; its answer passes through unchanged.

The first step affects only speed, not correctness. If no prefill server answers within twice the time that
its measured speed says, the decode server computes the prompt. If a decode server is down, or fails once
before the client has received a byte, the next one gets the request, and finally a prefill server, which can
also decode (`cluster/tries.py` has the rules). If a stream breaks off in the middle, the answer ends with an
error event: it can't be continued, and must not look finished.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import orjson
from fastapi import FastAPI
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import ConfigError
from stemma.two_ways import Way
from stemma_router.cluster.detour import Detour
from stemma_router.cluster.fleet import Fleet
from stemma_router.cluster.member import Outcome
from stemma_router.cluster.routers import Rendezvous, RoutedRequest
from stemma_router.cluster.tries import Tries
from stemma_router.routing.app import create_proxy_app
from stemma_router.routing.asking import ask_of, number_of, pooled_ask_of
from stemma_router.routing.checks import keep_checking
from stemma_router.routing.dashboard import Dashboard
from stemma_router.routing.description import describe, num_failures
from stemma_router.routing.metrics import counters, fleet_metrics
from stemma_router.routing.prompts import (
    POOLED,
    head_of,
    is_streamed,
    one_token_body,
    pooled_head_of,
)
from stemma_router.routing.relay import (
    Relay,
    Relayed,
    RouteOptions,
    kept_headers,
    nobody_answers,
    path_of,
    read_body,
    relay_client,
)
from stemma_router.routing.sending import Outgoing, send

ServerGroup = tuple[Sequence[str], Sequence[str]]
"""URLs of prefill servers and of decode servers that share a pool."""
_GROUP_HEAD = 256
"""Bytes of the beginning that choose a group: few, so that the second round of a dialogue that was sent as
plain text finds the pool of its first. Within a group the pool has what another server computed."""


class FleetsRouter:
    """Two fleets with one pool: the beginning of the prompt and the load choose a server of each."""

    def __init__(self, prefills: Sequence[str], decodes: Sequence[str], relay: Relay) -> None:
        if not prefills or not decodes:
            raise ConfigError("name at least one prefill server and one decode server")
        self.prefills = Fleet(Rendezvous(), [url.rstrip("/") for url in prefills], has_events=False)
        self.decodes = Fleet(Rendezvous(), [url.rstrip("/") for url in decodes], has_events=False)
        self.num_fallbacks = 0
        """Requests that a prefill server answered in place of a decode server."""
        self._relay = relay
        self._detours = {is_streamed: Detour(time.monotonic) for is_streamed in (False, True)}
        """By whether answers are streamed."""

    @property
    def num_alone(self) -> int:
        """Requests that went to a decode server at once, since that is faster."""
        return sum(detour.num_alone for detour in self._detours.values())

    async def generate(self, request: Request, content: bytes, body: dict[str, Any]) -> tuple[Response, bool]:
        """Prefill on one server, decode on another. A client that leaves ends the work on both.

        Where the decode server alone is faster, it gets the request at once. Returns what `send` does.
        """
        path, headers = request.scope["path"], kept_headers(request)
        if path in POOLED:  # nothing to decode
            ask, outgoing = pooled_ask_of(body, 1), Outgoing(path_of(request), content, headers, False)
            answer, may_go_on = await send(self.prefills, self._relay, ask, outgoing)
            return (answer, False) if not may_go_on else await send(self.decodes, self._relay, ask, outgoing)
        ask = ask_of(body, None, 1)
        outgoing = Outgoing(path_of(request), content, headers, is_streamed(path, body))
        detour, way = self._detours[outgoing.is_streamed], Way.ALONE
        if body and detour.choose(ask.num_tokens, self._prefill_s(ask)) is Way.THROUGH:
            is_done = await self._prefill(path, body, headers, ask)
            way = Way.THROUGH if is_done else Way.ALONE
        begun = time.monotonic()
        answer, may_go_on = await send(self.decodes, self._relay, ask, outgoing)
        if not may_go_on:
            if body and answer.status_code == httpx.codes.OK:
                detour.observe(way, ask.num_tokens, time.monotonic() - begun)
            return answer, False
        self.num_fallbacks += 1
        return await send(self.prefills, self._relay, ask, outgoing)

    def _prefill_s(self, ask: RoutedRequest) -> float | None:
        """Return how long a prefill server will take, behind what it has; None: it isn't measured."""
        first = next(iter(self.prefills.order(ask)), None)
        if first is None or not first.speed.num_samples:
            return None
        return first.speed.expected_s(self.prefills.load(first).num_tokens + ask.num_tokens)

    async def _prefill(
        self, path: str, body: dict[str, Any], headers: dict[str, str], ask: RoutedRequest
    ) -> bool:
        """Have the prompt computed and put into the pool; a failure only costs time. Return whether it is.

        What is wrong with the request the decode server reports.
        """
        content = orjson.dumps(one_token_body(path, body))
        path = path.removesuffix("_stream")  # where it is computed without streaming
        # One token: the answer comes once the prompt is computed. If it is late, the decode server computes.
        outgoing = Outgoing(path, content, headers, is_streamed=True, is_optional=True)
        answer, _ = await send(self.prefills, self._relay, ask, outgoing)
        if isinstance(answer, Relayed):  # it wasn't asked for a stream
            await answer.drop()
            answer.when_over()
        return answer.status_code == httpx.codes.OK


class Groups:
    """Servers that share a pool form a group, and a request stays within one.

    The beginning of the prompt says within which, unless that is busy; if nobody there answers, the next one
    is tried.
    """

    def __init__(self, groups: Sequence[ServerGroup], relay: Relay) -> None:
        """Raises ConfigError if there is no group, or one lacks either kind of server."""
        routers = [FleetsRouter(prefills, decodes, relay) for prefills, decodes in groups]
        if not routers:
            raise ConfigError("name at least one prefill server and one decode server")
        self.relay = relay
        self._routers = {router.decodes.members[0].url: router for router in routers}
        self._groups = Fleet(Rendezvous(), self._routers, has_events=False)
        self.num_requests = 0

    async def generate(self, request: Request, content: bytes) -> Response:
        """Prefill on one server of a group, decode on another. A client that leaves ends the work on both."""
        self.num_requests += 1
        body = await read_body(request, content)
        head = (pooled_head_of if request.scope["path"] in POOLED else head_of)(body)[:_GROUP_HEAD]
        tries = Tries(self._groups, RoutedRequest((), 1, 1, number_of(head)), is_streamed=False)
        answer = nobody_answers()
        while (one := tries.next()) is not None:
            try:
                answer, may_go_on = await self._routers[one.url].generate(request, content, body)
            except BaseException:
                one.end(Outcome.LEFT)
                raise
            if isinstance(answer, Relayed):
                answer.when_over = _both(answer.when_over, partial(one.end, Outcome.ANSWERED))
                return answer
            one.end(Outcome.BUSY if may_go_on else Outcome.ANSWERED)
        return answer

    def describe(self) -> dict[str, Any]:
        """Return the counters since the start, and the requests that each server works on."""
        routers = self._routers.values()
        prefills = [member for router in routers for member in router.prefills.members]
        decodes = [member for router in routers for member in router.decodes.members]
        servers = [describe(fleet) for router in routers for fleet in (router.decodes, router.prefills)]
        return {
            "servers": {url: standing for one in servers for url, standing in one["servers"].items()},
            "under_way": {member.url: len(member.under_way) for member in (*prefills, *decodes)},
            "num_requests": self.num_requests,
            "num_prefill_failures": sum(map(num_failures, prefills)),
            "num_decode_failures": sum(map(num_failures, decodes)),
            "num_fallbacks": sum(router.num_fallbacks for router in routers),
            "num_alone": sum(router.num_alone for router in routers),
            "num_broken_streams": self.relay.num_broken_streams,
        }

    def metrics(self) -> Iterable[Metric]:
        """Return what is counted, beside what the relay counts."""
        num_alone = sum(router.num_alone for router in self._routers.values())
        yield from counters(
            {
                "requests": ("Requests for text", self.num_requests),
                "alone": ("Requests that decode servers got at once, since that is faster", num_alone),
            }
        )
        yield from fleet_metrics(self.fleets())

    def fleets(self) -> Mapping[str, Fleet]:
        """Return the fleets of all groups, by role and number of the group."""
        named = [
            (router, f"-{place}" if place else "") for place, router in enumerate(self._routers.values())
        ]
        fleets = {f"prefill{end}": router.prefills for router, end in named}
        return fleets | {f"decode{end}": router.decodes for router, end in named}

    def known(self) -> Mapping[str, Mapping[str, Any]]:
        """Return nothing: no events are followed."""
        return {}

    def warnings(self) -> list[str]:
        """Return nothing: servers of two roles aren't compared."""
        return []

    @property
    def urls(self) -> tuple[str, ...]:
        """All servers, those first that answer requests that generate nothing."""
        routers = self._routers.values()
        decodes = [url for router in routers for url in router.decodes.urls]
        return (*decodes, *(url for router in routers for url in router.prefills.urls))

    async def is_up(self) -> bool:
        """Return whether any server can be asked."""
        return any(router.decodes.is_up or router.prefills.is_up for router in self._routers.values())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Check the servers meanwhile."""
        routers = self._routers.values()
        fleets = [fleet for router in routers for fleet in (router.prefills, router.decodes)]
        tasks = [asyncio.create_task(keep_checking(fleet, self.relay.client)) for fleet in fleets]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


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
    proxy = Groups(groups, Relay(client or relay_client(), options))
    return create_proxy_app(proxy, options, dashboard=Dashboard(proxy, options.admin_key))
