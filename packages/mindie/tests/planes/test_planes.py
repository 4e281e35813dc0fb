"""What holds for the core's planes holds for these: tenants, adapters, streams, cut prompts, explanations."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import torch
from tests.adapters import write_adapter
from tests.server.door.rig import Rig
from tests.server.scripted_engine import ScriptedEngine

from stemma.config.settings import Settings
from stemma.server.app import create_app

MODEL = "/v2/models/scripted"
FEW = {"max_new_tokens": 3}
TENSOR = {"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [1, 2, 3]}
PLANES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/infer", {"inputs": "a b c", "parameters": FEW}),
    ("/infer_token", {"input_id": [1, 2, 3], "parameters": FEW}),
    (f"{MODEL}/generate", {"text_input": "a b c", "parameters": FEW}),
    (f"{MODEL}/generate_stream", {"text_input": "a b c", "parameters": FEW}),
    (f"{MODEL}/infer", {"inputs": [TENSOR], "outputs": [{"name": "output0"}], "parameters": FEW}),
)
STREAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/infer", {"inputs": "ab", "stream": True}),
    (f"{MODEL}/generate_stream", {"text_input": "ab"}),
)


@pytest.mark.parametrize(("path", "body"), PLANES)
async def test_tenants_share_nothing(
    engine: ScriptedEngine, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    rig = Rig(engine, tmp_path, "")
    for who in ("ada", "bob", "ada"):
        assert (await rig.ask(who, body, path)).status_code == 200
    ada, bob, again = (request.namespace for request in engine.requests)
    assert ada == again != bob
    assert (await rig.ask("bob", {**body, "cache_salt": ada.salt}, path)).status_code == 200
    assert engine.requests[-1].namespace != ada


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_nobody_stops_anothers_request(engine: ScriptedEngine, tmp_path: Path, header: str) -> None:
    """Whichever header the key comes in; `stopInfer` looked at one of them only."""
    rig = Rig(engine, tmp_path, "")
    if header == "x-api-key":
        for who, bearer in rig.keys.items():
            rig.keys[who] = {header: bearer["authorization"].removeprefix("Bearer ")}
    engine.script.delay_s = 0.02
    body = {"id": "mine", "text_input": "ab", "parameters": {"max_new_tokens": 200}}
    running = asyncio.create_task(rig.ask("ada", body, f"{MODEL}/generate"))
    while not engine.active:
        await asyncio.sleep(0.01)
    stop = f"{MODEL}/stopInfer"
    assert (await rig.ask("bob", {"id": "mine"}, stop)).status_code == 404
    assert (await rig.ask("ada", {"id": "mine"}, stop)).status_code == 200
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


SUMS = ("/v1/status", "/v2/status", f"{MODEL}/getSlotCount", "/metrics-json")
"""Free blocks and running requests tell a hit from a miss, and a prompt's length."""


async def test_with_tenants_sums_are_for_the_operator(engine: ScriptedEngine, tmp_path: Path) -> None:
    rig = Rig(engine, tmp_path, "")
    for path in SUMS:
        for who in ("ada", "bob"):
            assert (await rig.client.get(path, headers=rig.keys[who])).status_code == 401
        assert (await rig.client.get(path)).status_code == 401
        operator = {"authorization": "Bearer root"}
        assert (await rig.client.get(path, headers=operator)).status_code == 200


async def test_without_tenants_sums_are_for_who_may_ask(client: httpx.AsyncClient) -> None:
    """As MindIE's controllers ask."""
    for path in SUMS:
        assert (await client.get(path)).status_code == 200


async def test_what_stops_the_server_has_no_head(client: httpx.AsyncClient) -> None:
    assert (await client.head("/stopService")).status_code == 405


async def test_another_name_of_the_model(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    engine.also_named = ("demo",)
    for path in ("/v2/models/demo/ready", "/v2/models/demo/getSlotCount"):
        assert (await client.get(path)).status_code == 200
    answer = await client.post("/v2/models/demo/generate", json={"id": "a", "text_input": "x"})
    assert answer.status_code == 200


@pytest.mark.parametrize(("path", "body"), [PLANES[0], PLANES[2]])
async def test_an_adapter_is_chosen_by_name(
    engine: ScriptedEngine, settings: Settings, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    layer = "model.layers.0.self_attn.q_proj"
    write_adapter(tmp_path / "sql", {layer: (torch.randn(4, 16), torch.randn(8, 4))})
    server = settings.server.model_copy(update={"lora_directories": (tmp_path,)})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    body = {**body, "parameters": {"adapter_id": "sql"}}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost"
    ) as client:
        assert (await client.post(path, json=body)).status_code == 404
        named = {"lora_name": "sql", "lora_path": str(tmp_path / "sql")}
        assert (await client.post("/v1/load_lora_adapter", json=named)).status_code == 200
        assert (await client.post(path, json=body)).status_code == 200
    assert engine.requests[-1].adapter is engine.adapters.get("sql")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infer", {"inputs": "x" * 20_000}),
        ("/infer", {"input_id": [1] * 10_000}),
        (f"{MODEL}/generate", {"text_input": "x" * 20_000}),
    ],
)
async def test_a_long_prompt_that_is_cut_fits(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    parameters = {"truncate": 3, "max_new_tokens": 2}
    response = await client.post(path, json={**body, "parameters": parameters})
    assert response.status_code == 200, response.text
    assert len(engine.requests[-1].prompt_token_ids) == 3
    without = await client.post(path, json={**body, "parameters": {"max_new_tokens": 2}})
    assert without.status_code in (413, 422), without.text


async def events_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return [orjson.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_one_event_a_token_whether_steps_are_joined_or_not(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "parameters": {"max_new_tokens": 23, "details": True}}
    apart = await events_of(client, path, body)
    engine.requests.clear()  # else the second finds the first's prompt in the cache
    engine.script.joined = 3
    together = await events_of(client, path, body)
    assert len(apart) == 23
    for event in (*apart, *together):
        for name in ("prefill_time", "decode_time"):
            event[name] = event[name] is None
    assert together == apart


async def test_times_of_tokens_share_the_time_of_their_delivery(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.joined = 3
    times = [event["decode_time"] for event in await events_of(client, *STREAMS[0])]
    assert times[0] is None
    assert times[1] == times[2] == times[3]


class TestSilence:
    """A stream speaks at once: headers before its first token, and comments while there is nothing else."""

    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        server = settings.server.model_copy(update={"stream_comment_s": 0.05})
        return settings.model_copy(update={"server": server})

    @pytest.mark.parametrize(("path", "body"), STREAMS)
    def test_comments_come_before_the_first_token(
        self, live_url: str, engine: ScriptedEngine, path: str, body: dict[str, Any]
    ) -> None:
        engine.script.gate = threading.Event()
        with httpx.stream("POST", live_url + path, json=body) as response:
            assert response.status_code == 200
            lines = []
            for line in response.iter_lines():
                lines.append(line)
                if sum(one.startswith(":") for one in lines) == 2:
                    engine.script.gate.set()
        first = next(number for number, line in enumerate(lines) if line.startswith("data: "))
        assert len([line for line in lines[:first] if line.startswith(":")]) >= 2
