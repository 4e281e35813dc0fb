"""A proxy in front of equal servers: each request goes where computing it, and waiting, costs least.

Where that is `cluster/fleet.py` says, which server follows if one fails `cluster/tries.py`; `served_fleet.py`
keeps them informed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx
from fastapi import FastAPI
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import ConfigError
from stemma_router.cluster.fleet import Fleet
from stemma_router.routing.app import create_proxy_app
from stemma_router.routing.dashboard import Dashboard
from stemma_router.routing.description import describe
from stemma_router.routing.metrics import counters
from stemma_router.routing.picker.endpoints import check_endpoints
from stemma_router.routing.picker.options import PickerOptions
from stemma_router.routing.prompts import is_streamed
from stemma_router.routing.relay import (
    Relay,
    RouteOptions,
    kept_headers,
    path_of,
    read_body,
    relay_client,
)
from stemma_router.routing.sending import Outgoing, send
from stemma_router.routing.served_fleet import ServedFleet
from stemma_router.routing.server_list import FleetServer, ServerList

if TYPE_CHECKING:  # torch isn't needed to pass requests on
    from stemma.model.text.tokenizer import Tokenizer


_log = logging.getLogger(__name__)
PickerSetup = tuple[PickerOptions, int, int]
"""With the largest body, and the memory of all bodies, in bytes."""


class FleetProxy:
    """Decides by a fleet of servers, their holdings and their loads."""

    def __init__(self, served: ServedFleet, relay: Relay, picker: PickerSetup | None = None) -> None:
        """`picker`: where Envoy asks; None: nowhere."""
        self.relay = relay
        self._picker = picker
        self.num_requests = 0
        self._served = served

    @property
    def urls(self) -> tuple[str, ...]:
        """All servers, those first that can be asked now."""
        return self._served.fleet.urls

    async def is_up(self) -> bool:
        """Return whether any server can be asked."""
        return self._served.fleet.is_up

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep the fleet up to date beside the requests."""
        async with self._served.serving():
            if self._picker is None:
                yield
                return
            from stemma_router.routing.picker.serving import serving_picker  # gRPC is an extra

            async with serving_picker(self._served, *self._picker) as port:
                _log.warning("Envoy's endpoint picker listens on port %d", port)
                yield

    async def generate(self, request: Request, content: bytes) -> Response:
        """Answer a request that generates."""
        self.num_requests += 1
        body = await read_body(request, content)
        headers, path = kept_headers(request), request.scope["path"]
        ask = await self._served.ask(path, body, headers)
        streams = is_streamed(path, body)
        outgoing = Outgoing(
            path_of(request), content, headers, streams, continues="previous_response_id" in body
        )
        answer, _ = await send(self._served.fleet, self.relay, ask, outgoing)
        return answer

    def describe(self) -> dict[str, Any]:
        """Return what is known of each server."""
        return {
            "num_requests": self.num_requests,
            "num_broken_streams": self.relay.num_broken_streams,
            **self._served.describe(),
            **describe(self._served.fleet),
        }

    def fleets(self) -> Mapping[str, Fleet]:
        """Return the one fleet."""
        return {"equal": self._served.fleet}

    def known(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what is known of each server's blocks."""
        return self._served.known()

    def warnings(self) -> list[str]:
        """Return what an operator should change, a sentence each."""
        return self._served.warnings()

    def metrics(self) -> Iterable[Metric]:
        """Return what is counted, beside what the relay counts."""
        yield from counters({"requests": ("Requests for text", self.num_requests)})
        yield from self._served.metrics()


def create_fleet_app(
    servers: Sequence[FleetServer] | ServerList,
    router: str = "cache-aware",
    *,
    client: httpx.AsyncClient | None = None,
    options: RouteOptions | None = None,
    tokenizer: Tokenizer | None = None,
    endpoint_picker: PickerOptions | None = None,
) -> FastAPI:
    """Return the proxy. Raises ConfigError for an unknown router, or no servers.

    `endpoint_picker`: where Envoy is answered too; this needs the extra `envoy`.
    """
    options, client = options or RouteOptions(), client or relay_client()
    source = servers if isinstance(servers, ServerList) else ServerList(servers)
    served = ServedFleet(source, router, client, tokenizer=tokenizer)
    picker = None
    if endpoint_picker is not None:
        if find_spec("envoy_data_plane") is None or find_spec("grpc_health") is None:
            raise ConfigError("an endpoint picker needs gRPC: pip install 'stemma-router[envoy]'")
        check_endpoints(server.url for server in source.entries if server.dns_name is None)
        picker = endpoint_picker, options.max_body_bytes, options.body_memory
    proxy = FleetProxy(served, Relay(client, options), picker)
    return create_proxy_app(proxy, options, dashboard=Dashboard(proxy, options.admin_key))
