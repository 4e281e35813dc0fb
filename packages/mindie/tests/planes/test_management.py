"""MindIE's management plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_process import scripted_server

from stemma.config.settings import Settings
from stemma.server.app import create_app


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/scripted/ready"])
async def test_health(client: httpx.AsyncClient, engine: ScriptedEngine, path: str) -> None:
    normal = await client.get(path)
    assert (normal.status_code, normal.content) == (200, b"")
    engine.failure = "the step loop died"
    failed = await client.get(path)
    assert failed.status_code == 500
    assert "the step loop died" in failed.text


async def test_a_full_queue_is_alive_but_not_ready(engine: ScriptedEngine, settings: Settings) -> None:
    scheduler = settings.engine.scheduler.model_copy(update={"max_waiting": 0})
    engine_settings = settings.engine.model_copy(update={"scheduler": scheduler})
    full = settings.model_copy(update={"engine": engine_settings})
    transport = httpx.ASGITransport(app=create_app(engine, full))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        live = await client.get("/v2/health/live")
        ready = await client.get("/v2/health/ready")

    assert (live.status_code, live.json()) == (200, {"message": "Service is alive but busy"})
    assert ready.status_code == 503
    assert "Consider reducing" in ready.json()["message"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/health/timed", 200),
        ("/health/timed-3", 200),
        ("/health/timed-600", 200),
        ("/health/timed-601", 422),
        ("/health/timed-0", 422),
        ("/health/timedx", 422),
        ("/v2/models/other/ready", 404),
        ("/v2/models/other/getSlotCount", 404),
        ("/v1/config", 200),
        ("/v1/status", 200),
        ("/v2/status", 200),
    ],
)
async def test_statuses(client: httpx.AsyncClient, path: str, status: int) -> None:
    assert (await client.get(path)).status_code == status


async def test_slots_and_blocks(client: httpx.AsyncClient) -> None:
    slots = (await client.get("/v2/models/scripted/getSlotCount")).json()
    status = (await client.get("/v1/status")).json()

    assert slots == {"total_slots": 256, "free_slots": 256, "available_tokens_length": 16 * 64}
    assert status["resource"]["availBlockNum"] == 16
    assert status["resource"]["freeNpuBlockNums"] == 6
    assert status["service"]["currentRole"] == "both"


async def test_metrics_json(client: httpx.AsyncClient) -> None:
    await client.post("/generate", json={"inputs": "ab"})
    body = (await client.get("/metrics-json")).json()

    values = {item["metric"][0]["__name__"]: item["value"] for item in body["result"]}
    assert values.keys() == {
        "TTFT",
        "TBT",
        "waitingInferRequestNum",
        "processingInferRequestNum",
        "remainBlocks",
    }
    assert float(values["TTFT"]) > 0
    assert values["remainBlocks"] == "16"


async def test_a_server_that_others_started_is_not_stopped(client: httpx.AsyncClient) -> None:
    response = await client.get("/stopService")
    assert response.status_code == 400
    assert "where it was started" in response.text


def test_stop_service_drains_and_a_web_page_may_not(tokenizer_path: Path) -> None:
    with scripted_server(tokenizer_path, delay_s=0.0, drain_s=30) as (process, url):
        page = httpx.get(f"{url}/stopService", headers={"sec-fetch-site": "cross-site"})
        assert page.status_code == 403
        assert httpx.get(f"{url}/stopService?mode=Now").status_code == 400
        assert process.poll() is None
        assert httpx.get(f"{url}/stopService?mode=Force").status_code == 200
        assert process.wait(10) == 0


async def command(client: httpx.AsyncClient, cmd: object) -> httpx.Response:
    return await client.post("/v1/engine-server/fault-handling-command", json={"cmd": cmd})


async def test_a_fault_is_handled_by_pause_reinitialisation_and_start(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    async def status() -> int:
        body = (await client.get("/v1/engine-server/running-status")).json()
        assert body["errors"] == []
        return int(body["status"])

    assert await status() == 1
    paused = await command(client, 0)
    assert paused.json() == {
        "status": True,
        "message": "",
        "reason": [{"device_id": 0, "result": True, "message": ""}],
    }
    assert (engine.paused, await status()) == (True, 3)
    assert (await client.get("/v2/health/ready")).status_code == 500
    assert (await client.get("/v2/health/live")).status_code == 500
    assert (await command(client, 3)).status_code == 400
    assert (await command(client, 1)).status_code == 200
    assert await status() == 0
    assert (await command(client, 2)).status_code == 200
    assert (engine.paused, await status()) == (False, 1)
    wrong = await command(client, 2)
    assert wrong.json() == {
        "error": "Command is not consistent with current status.",
        "error_type": "Bad Request",
    }


@pytest.mark.parametrize("cmd", [None, "0", 1.5, [], True])
async def test_a_command_is_an_integer(client: httpx.AsyncClient, cmd: object) -> None:
    assert (await command(client, cmd)).status_code == 422
    assert (await command(client, 7)).status_code == 400


async def test_failures_are_told_with_the_status(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.failure = "the step loop died"
    body = (await client.get("/v1/engine-server/running-status")).json()
    assert body["status"] == 2
    assert body["errors"][0]["message"] == "the step loop died"
    assert (await command(client, 0)).status_code == 400


DEVICE = {"device_logical_id": "0", "device_id": "1", "device_ip": "10.0.0.1"}
V1: dict[str, Any] = {"local": {"server_ip": "10.0.0.1", "device": [DEVICE]}, "peers": []}
V2 = {
    "local": [
        {
            "server_ip": "10.0.0.1",
            "host_ip": "10.0.0.1",
            "dp_inst_list": [{"dp_inst_id": 1, "device": [DEVICE]}],
        }
    ],
    "peers": [],
}


@pytest.mark.parametrize(
    ("role", "path", "body", "status"),
    [
        ("both", "/v1/role/flex", V1, 200),
        ("both", "/v1/role/prefill", V1, 503),
        ("prefill", "/v1/role/prefill", V1, 200),
        ("prefill", "/v2/role/prefill", V2, 200),
        ("prefill", "/v2/role/decode", V2, 503),
        ("decode", "/v1/role/decode", {}, 422),
        ("decode", "/v1/role/decode", {"local": {**V1["local"], "server_ip": "x"}}, 422),
        ("decode", "/v2/role/flex", V2, 404),
    ],
)
async def test_a_role_is_confirmed_or_refused(
    engine: ScriptedEngine, settings: Settings, role: str, path: str, body: object, status: int
) -> None:
    engine_settings = settings.engine.model_copy(update={"role": role})
    app = create_app(engine, settings.model_copy(update={"engine": engine_settings}))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost"
    ) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status
    if status == 200:
        assert answer.json() == {"result": "ok"}
    if status == 503:
        assert "start it with --role" in answer.json()["error"]
