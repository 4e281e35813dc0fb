"""The HTTP application around a proxy: its routes, its health, and its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import StemmaError
from stemma.server.door.access import has_key
from stemma.server.errors import json_response, openai_error
from stemma.server.transport.headers import Entrance
from stemma_router.routing.dashboard import Dashboard
from stemma_router.routing.metrics import render
from stemma_router.routing.prompts import GENERATING, POOLED
from stemma_router.routing.relay import Relay, RouteOptions


class Proxy(Protocol):
    """Decides where requests go."""

    @property
    def relay(self) -> Relay:
        """The relay that passes requests on."""

    @property
    def urls(self) -> tuple[str, ...]:
        """All servers, those first that answer requests that generate nothing."""

    async def is_up(self) -> bool:
        """Return whether any server can be asked."""

    async def generate(self, request: Request, content: bytes) -> Response:
        """Answer a request that generates."""

    def describe(self) -> dict[str, Any]:
        """Return what is known of the servers, and the counters since the start."""

    def metrics(self) -> Iterable[Metric]:
        """Return what is counted, beside what the relay counts."""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Return what runs beside the requests."""


def create_proxy_app(
    proxy: Proxy,
    options: RouteOptions,
    all_metrics: Callable[[Request], Awaitable[bytes]] | None = None,
    dashboard: Dashboard | None = None,
) -> FastAPI:
    """Return the application; it closes the proxy's HTTP client at its end.

    `all_metrics`: what `/metrics` says in place of the proxy's own.
    """

    proxy.relay.ask_for_keys(lambda: proxy.urls)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with proxy.serving():
                yield
        finally:
            await proxy.relay.client.aclose()

    async def generate(request: Request) -> Response:
        return await proxy.relay.answered(request, proxy.generate)

    async def first_of_all(request: Request, content: bytes) -> Response:
        return await proxy.relay.first_of(request, content, proxy.urls)

    async def pass_on(request: Request) -> Response:
        return await proxy.relay.answered(request, first_of_all)

    async def health(request: Request) -> Response:
        """Whether any server can be asked; who has the key sees each of them, and what is known of it."""
        is_up = await proxy.is_up()
        body: dict[str, Any] = {"status": "ok" if is_up else "down"}
        if has_key(request, options.admin_key):
            budgets = proxy.relay.bodies, proxy.relay.answers
            body |= {"budgets": [asdict(one.state()) for one in budgets], **proxy.describe()}
        return json_response(body, 200 if is_up else 503)

    async def metrics(request: Request) -> Response:
        """For whoever has the admin key; without one, for this machine."""
        try:
            proxy.relay.check_operator(request, options.admin_key)
        except StemmaError as error:
            return openai_error(error)
        if all_metrics is not None:
            return Response(await all_metrics(request), media_type=CONTENT_TYPE_LATEST)
        return Response(render(proxy.relay.metrics(), proxy.metrics()), media_type=CONTENT_TYPE_LATEST)

    app = FastAPI(title="Stemma route", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.add_middleware(Entrance)
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/metrics", metrics, methods=["GET"])
    if dashboard is not None:
        dashboard.add_to(app)
    for path in (*GENERATING, *POOLED):
        app.add_route(path, generate, methods=["POST"])
    app.add_route("/{path:path}", pass_on, methods=["GET", "POST", "DELETE", "PUT"])
    return app
