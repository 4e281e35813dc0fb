"""Refused requests leave a trace: a line of the log, a counter, and a place where the operator reads them."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from rich.console import Console

from stemma.cli.explain import show_refused
from stemma.config.settings import Settings
from stemma.server.app import create_app
from stemma.server.observe.refusals import MAX_REFUSALS
from tests.server.scripted_engine import ScriptedEngine

BAD = {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}


async def refusals(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/admin/refusals")).json()["refusals"]
    return found


def local(engine: ScriptedEngine, settings: Settings, **server: Any) -> httpx.AsyncClient:
    changed = settings.model_copy(update={"server": settings.server.model_copy(update=server)})
    transport = httpx.ASGITransport(app=create_app(engine, changed), client=("127.0.0.1", 1))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_the_last_refusals_name_field_and_client(client: httpx.AsyncClient) -> None:
    await client.post(
        "/v1/chat/completions", json=BAD, headers={"user-agent": "agent/1", "x-request-id": "r1"}
    )
    await client.post("/v1/unknown", json={})
    unknown, wrong = await refusals(client)
    assert (wrong["route"], wrong["status"], wrong["reason"]) == (
        "/v1/chat/completions",
        400,
        "invalid_request",
    )
    assert wrong["field"].startswith("messages[0].content")
    assert (wrong["client"], wrong["x_request_id"]) == ("agent/1", "r1")
    assert (unknown["route"], unknown["status"]) == ("other", 404)
    text = (await client.get("/metrics")).text
    labels = '{reason="invalid_request",route="/v1/chat/completions"}'
    assert f"stemma_requests_refused_total{labels} 1.0" in text


async def test_only_the_last_ones_are_kept(client: httpx.AsyncClient) -> None:
    for _ in range(MAX_REFUSALS + 5):
        await client.get("/v1/responses/none")
    assert len(await refusals(client)) == MAX_REFUSALS


async def test_a_request_refused_before_the_engine_is_one_line_of_the_log(
    engine: ScriptedEngine, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stemma.requests")
    async with local(engine, settings, log_requests=True) as client:
        await client.post("/v1/chat/completions", json=BAD, headers={"x-request-id": "r1"})
        engine.script.overloaded = True
        await client.post("/v1/completions", json={"prompt": "x"})
    first, second = [one.getMessage() for one in caplog.records if one.name == "stemma.requests"]
    assert first == (
        "route=/v1/chat/completions outcome=refused status=400 reason=invalid_request "
        "field=messages[0].content[0].type x_request_id=r1"
    )
    assert "request=" in second, "what reached the engine has the one line that it had before"
    assert "outcome=refused" in second


def test_what_clients_wrote_is_shown_without_control_characters() -> None:
    console = Console(record=True, width=200)
    evil = "\x1b[2Jx\r\n\u202e"
    one = {name: evil for name in ("route", "reason", "field", "message", "client", "tenant", "x_request_id")}
    show_refused(console, [{**one, "at": 0.0, "status": 400}])
    shown = console.export_text()
    assert "1970-01-01 00:00:00  400" in shown
    assert not any(char in shown for char in "\x1b\r\u202e")
    show_refused(console, [])
    assert "No request was refused." in console.export_text()
