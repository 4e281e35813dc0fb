"""The ASGI application: every plane over one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from stemma import __version__
from stemma.config.settings import Settings
from stemma.engine.client import EngineClient
from stemma.errors import NotFound
from stemma.server.apis import (
    embeddings,
    openai_chat,
    openai_completions,
    reranking,
    tgi,
    tokenize,
)
from stemma.server.apis.messages import api as messages
from stemma.server.apis.responses import api as responses
from stemma.server.apis.responses import conversations
from stemma.server.errors import json_response, openai_body
from stemma.server.guest_apis import guest_routers
from stemma.server.observe.metrics import ServerMetrics
from stemma.server.observe.request_log import log_request
from stemma.server.observe.tracing import Tracing, TracingMiddleware
from stemma.server.observe.watches import Watches
from stemma.server.openapi import describe, document_router
from stemma.server.operator import (
    admin,
    admin_explain,
    admin_pool,
    admin_published,
    lora_adapters,
    management,
)
from stemma.server.operator.dashboard import live, tree
from stemma.server.parts import close_parts, put_parts, running
from stemma.server.routes import tell_refusal, without_audience
from stemma.server.transport.headers import Entrance
from stemma.server.web import pages

ROUTERS = (
    document_router,
    openai_chat.router,
    openai_completions.router,
    embeddings.router,
    reranking.router,
    responses.router,
    conversations.router,
    messages.router,
    tgi.router,
    management.open_router,
    management.router,
    management.admin_router,
    admin.router,
    admin.file_router,
    admin_explain.router,
    live.router,
    tree.router,
    pages.router,
    admin_pool.router,
    lora_adapters.router,
    admin_published.router,
    tokenize.router,
)
"""Of the core: one per API and per part of the operator's plane; a new one is a new file and a line here."""
_MAX_PATH_CHARS = 200


def all_routers() -> list[APIRouter]:
    """Return the core's routers, then those of installed packages: a path of the core's stays its own."""
    return [*ROUTERS, *guest_routers()]


def create_app(
    engine: EngineClient,
    settings: Settings,
    metrics: ServerMetrics | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Return the application. It doesn't own the engine: the caller closes it.

    `tracing` None: as the settings say.
    """
    if tracing is None and settings.server.otlp_endpoint is not None:
        tracing = Tracing.to_collector(settings.server.otlp_endpoint)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(app.state):
            yield
        close_parts(app.state)
        if tracing is not None:
            tracing.close()

    app = FastAPI(
        title="Stemma",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    put_parts(app, engine, settings, metrics or ServerMetrics())
    watches: Watches = app.state.instruments.watches
    if settings.server.log_requests:
        watches.observers.append(log_request)
    if tracing is not None:
        watches.capture = tracing.capture
        watches.observers.append(tracing.record)
    routers = all_routers()
    routes = [each for router in routers for each in router.routes]
    app.openapi = partial(describe, app, routes)  # type: ignore[method-assign]
    for router in routers:
        app.include_router(router)
    if nameless := without_audience(routes):
        raise TypeError(f"routes without an audience: {', '.join(nameless)}")
    if settings.server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.server.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-stemma-cached-tokens", "retry-after", "x-request-id", "request-id"],
        )
    if tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=tracing)
    app.add_middleware(Entrance)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path'][:_MAX_PATH_CHARS]}: {error.detail}"
    if error.status_code == 404:
        message += "; it may be of a package that isn't installed beside the server, as stemma-lab"
    tell_refusal(request, NotFound(message), "other", error.status_code)
    return json_response(openai_body(message, "invalid_request_error"), error.status_code, error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected error; Starlette logs the traceback."""
    return json_response(openai_body("internal error", "server_error"), 500)
