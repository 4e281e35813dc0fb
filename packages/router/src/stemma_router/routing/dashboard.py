"""`/dashboard` of a proxy: its files, which hold no data, and what they show, for who may read `/metrics`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import NotFound, Overloaded, StemmaError
from stemma.server.errors import json_response, openai_error
from stemma.server.transport.sse import EventStream, event
from stemma.server.web.assets import asset
from stemma.server.web.pages import PAGES, SHARED
from stemma_router.cluster.fleet import Fleet
from stemma_router.cluster.member import FleetMember
from stemma_router.routing.relay import Relay

EVERY_S = 1.0
MAX_STREAMS = 16
MAX_REFUSALS = 50
_OWN = "stemma_router.page"


class FleetsProxy(Protocol):
    """A proxy that knows its servers."""

    @property
    def relay(self) -> Relay:
        """The relay that passes requests on."""

    def fleets(self) -> Mapping[str, Fleet]:
        """Return the servers by role."""

    def known(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what else is known of servers, by URL."""

    def warnings(self) -> list[str]:
        """Return what an operator should change, a sentence each."""


class Dashboard:
    """What one proxy shows its operator."""

    def __init__(self, proxy: FleetsProxy, admin_key: str | None) -> None:
        self._proxy = proxy
        self._admin_key = admin_key
        self._started_at = time.time()
        self._num_streams = 0

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        for path, handler in (
            ("/dashboard", self.page),
            ("/dashboard/{name}", self.file),
            ("/admin/live/now", self.now),
            ("/admin/live", self.live),
        ):
            app.add_route(path, handler, methods=["GET"])

    async def page(self, _request: Request) -> Response:
        """The page itself."""
        return asset(_OWN, "fleet.html")

    async def file(self, request: Request) -> Response:
        """Its script, and what it shares with a server's pages."""
        name = request.path_params["name"]
        if name == "fleet.js":
            return asset(_OWN, name)
        return asset(PAGES, name) if name in SHARED else openai_error(NotFound("no such file of the page"))

    async def now(self, request: Request) -> Response:
        """One look."""
        return self._refusal(request) or json_response(self.shown())

    async def live(self, request: Request) -> Response:
        """A look each second as server-sent events, until the client leaves."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if self._num_streams >= MAX_STREAMS:
            return openai_error(Overloaded(f"{MAX_STREAMS} pages watch this router already; close one"))
        return EventStream(self._looks())

    def _refusal(self, request: Request) -> Response | None:
        try:
            self._proxy.relay.check_operator(request, self._admin_key)
        except StemmaError as error:
            return openai_error(error)
        return None

    async def _looks(self) -> AsyncGenerator[bytes, None]:
        self._num_streams += 1
        try:
            while True:
                yield event(self.shown())
                await asyncio.sleep(EVERY_S)
        finally:
            self._num_streams -= 1

    def shown(self) -> dict[str, Any]:
        """Return all that the page shows."""
        proxy, relay = self._proxy, self._proxy.relay
        budgets = (relay.bodies.state(), relay.answers.state())
        return {
            "time": time.time(),
            "started_at": self._started_at,
            "fleets": [_fleet_as_json(role, fleet, proxy.known()) for role, fleet in proxy.fleets().items()],
            "warnings": proxy.warnings(),
            "lately": relay.lately.told(),
            "refusals": relay.refusals.last()[:MAX_REFUSALS],
            "num_broken_streams": relay.num_broken_streams,
            "budgets": [asdict(one) for one in budgets],
        }


def _fleet_as_json(role: str, fleet: Fleet, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "role": role,
        "lately": fleet.lately.told(),
        "servers": [
            _server_as_json(fleet, member) | dict(known.get(member.url, {})) for member in fleet.members
        ],
        "events": [asdict(one) for one in fleet.events],
    }


def _server_as_json(fleet: Fleet, member: FleetMember) -> dict[str, Any]:
    load, told, health = fleet.load(member), member.told, member.health
    first_byte = member.latest_first_byte
    return {
        "url": member.url,
        "standing": health.standing.value,
        "age_s": fleet.age_s(member),
        "ejected_for_s": health.ejected_for_s,
        "ejections": {cause.value: count for cause, count in health.ejections.items()},
        "requests": load.num_requests,
        "tokens_to_compute": load.num_tokens,
        "told": None if told.load is None else told.load.model_dump(mode="json"),
        "first_byte_s": first_byte.mean_s if first_byte.num_samples else None,
        "outcomes": {outcome.value: count for outcome, count in member.outcomes.items()},
        "retries": member.num_retries,
        "prompt_tokens": member.num_prompt_tokens,
        "predicted_tokens": member.num_predicted_tokens,
        "delivered_tokens": member.num_delivered_tokens,
    }
