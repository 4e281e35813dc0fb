"""APIs that packages beside the core bring."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stemma import guests
from stemma.cli.serve import open_front
from stemma.config.server_settings import RequestSettings, ServerSettings
from stemma.config.settings import Settings
from stemma.errors import ConfigError
from stemma.server.app import create_app
from stemma.server.errors import json_response, openai_error
from stemma.server.guest_apis import GROUP, GuestApi, guest_apis
from stemma.server.observe.metric_aliases import AliasNames
from stemma.server.routes import PUBLIC, Router
from stemma.server.turn.context import context_of
from tests.server.scripted_engine import ScriptedEngine

router = Router(openai_error)


@router.get("/greeting", PUBLIC)
async def greeting(request: Request) -> Response:
    """Name the model."""
    return json_response({"model": context_of(request).engine.model_name})


@router.get("/health", PUBLIC)
async def not_theirs(request: Request) -> Response:
    """Never answers: the path is the core's."""
    return json_response({"status": "taken"})


def _counters(_: object) -> tuple[tuple[str, str, float], ...]:
    return (("greetings", "Greetings", 3.0),)


API = GuestApi((router,), AliasNames({}, _counters, lambda _: ()))


@asynccontextmanager
async def _opened(app: FastAPI) -> AsyncIterator[None]:
    app.state.opened = "open"
    yield
    app.state.opened = "closed"


def begin(app: FastAPI) -> AbstractAsyncContextManager[None]:
    app.state.opened = app.state.operator.engine.model_name
    return _opened(app)


OPENER, IDLE = GuestApi((), begin=begin), GuestApi((), begin=lambda _: None)


@pytest.fixture(autouse=True)
def _looked_for_anew() -> Iterator[None]:
    guest_apis.cache_clear()
    yield
    guest_apis.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = EntryPoints([EntryPoint(name, value, GROUP) for name, value in values.items()])
    monkeypatch.setattr(guests, "entry_points", points.select)


def client_of(engine: ScriptedEngine, settings: Settings) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(engine, settings))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_a_packages_routes_answer_and_are_described_and_take_no_path_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine, settings: Settings
) -> None:
    install(monkeypatch, greeter=f"{__name__}:API")
    async with client_of(engine, settings) as client:
        assert (await client.get("/greeting")).json() == {"model": "scripted"}
        assert "/greeting" in (await client.get("/openapi.json")).json()["paths"]
        assert (await client.get("/health")).json()["status"] == "ok"
        assert "greetings" not in (await client.get("/metrics")).text


async def test_a_packages_names_of_metrics_are_shown_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine, settings: Settings
) -> None:
    install(monkeypatch, greeter=f"{__name__}:API")
    server = ServerSettings(metric_aliases=("greeter",))
    async with client_of(engine, settings.model_copy(update={"server": server})) as client:
        assert "greetings_total" in (await client.get("/metrics")).text


async def test_a_package_that_cannot_be_imported_is_told_and_the_server_serves(
    monkeypatch: pytest.MonkeyPatch,
    engine: ScriptedEngine,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(monkeypatch, broken="no_such_module:API", greeter=f"{__name__}:API")
    with caplog.at_level(logging.WARNING):
        client = client_of(engine, settings)
    assert "no_such_module" in caplog.text
    async with client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/greeting")).status_code == 200


async def test_a_packages_parts_are_open_while_the_server_serves(
    monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine, settings: Settings
) -> None:
    install(monkeypatch, opener=f"{__name__}:OPENER", idle=f"{__name__}:IDLE")
    app = create_app(engine, settings)
    assert app.state.opened == "scripted"
    async with app.router.lifespan_context(app):
        assert app.state.opened == "open"
    assert app.state.opened == "closed"


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": RequestSettings(dialect="mindie")},
        {"server": ServerSettings(metric_aliases=("mindie",))},
        {"server": ServerSettings(batch_directory=Path("batches"))},
    ],
    ids=("dialect", "metric_aliases", "batch_directory"),
)
@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, r"pip install \./packages/(mindie|batch)"),
        ({"mindie": "no_such_module:API", "batch": "no_such_module:API"}, "no_such_module"),
    ],
    ids=("missing", "broken"),
)
def test_a_setting_that_needs_a_package_says_so(
    monkeypatch: pytest.MonkeyPatch,
    engine: ScriptedEngine,
    settings: Settings,
    changes: dict[str, object],
    installed: dict[str, str],
    message: str,
) -> None:
    install(monkeypatch, **installed)
    changed = settings.model_copy(update=changes)
    with pytest.raises(ConfigError, match=message):
        create_app(engine, changed)
    with ExitStack() as stack, pytest.raises(ConfigError, match=message):  # before a model is loaded
        open_front(changed, stack)
