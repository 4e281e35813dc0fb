"""What requests take from the budgets, and that all of it comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from stemma.server.door.keyfile import add_key
from tests.server.door.rig import CHAT, PROMPT, Rig
from tests.server.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("field", ["n", "best_of"])
async def test_each_sequence_counts(engine: ScriptedEngine, tmp_path: Path, field: str) -> None:
    """`n=64` under `max_concurrent=2` gave 64 answers."""
    rig = Rig(engine, tmp_path, "max_concurrent = 2")
    refused = await rig.ask("ada", {**PROMPT, field: 3, "temperature": 1.0})
    assert refused.status_code == 400
    assert "your limit is 2" in refused.text
    engine.script.delay_s = 0.05
    running = asyncio.create_task(rig.ask("ada", {**PROMPT, field: 2, "temperature": 1.0}))
    while not engine.requests:
        await asyncio.sleep(0.01)
    busy = await rig.ask("ada", PROMPT)
    assert (busy.status_code, "retry-after" in busy.headers) == (429, True)
    assert (await rig.ask("bob", PROMPT)).status_code == 200
    assert (await running).status_code == 200
    assert set((await rig.held()).values()) == {0}


async def test_each_sequence_is_one_of_the_minutes_requests(engine: ScriptedEngine, tmp_path: Path) -> None:
    rig = Rig(engine, tmp_path, "requests_per_minute = 4")
    assert (await rig.ask("ada", {**PROMPT, "n": 3})).status_code == 200
    assert (await rig.ask("ada", {**PROMPT, "n": 2})).status_code == 429


async def test_output_tokens_are_reserved_and_what_was_not_used_comes_back(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    rig = Rig(engine, tmp_path, "tokens_per_minute = 1000")
    engine.script.reply = "abc"
    engine.script.delay_s = 0.05
    running = asyncio.create_task(rig.ask("ada", {**PROMPT, "max_tokens": 900}))
    while not engine.requests:
        await asyncio.sleep(0.01)
    assert (await rig.held())["output_tokens"] == 900
    assert (await rig.ask("ada", {**PROMPT, "max_tokens": 200})).status_code == 429
    assert (await running).status_code == 200
    engine.script.delay_s = 0.0
    assert (await rig.ask("ada", {**PROMPT, "max_tokens": 900})).status_code == 200


async def test_one_tenant_holds_half_of_the_sequences(engine: ScriptedEngine, tmp_path: Path) -> None:
    rig = Rig(engine, tmp_path, "", max_waiting=1)
    engine.script.delay_s = 0.2
    tasks = [asyncio.create_task(rig.ask("ada", {**PROMPT, "prompt": [1, 2], "n": 32})) for _ in range(4)]
    while (await rig.held())["sequences"] < 128:
        assert not any(one.done() and one.result().status_code != 200 for one in tasks), tasks
        await asyncio.sleep(0.01)
    mine, others = await asyncio.gather(
        *(rig.ask(name, {**PROMPT, "prompt": [1, 2]}) for name in ("ada", "bob"))
    )
    assert (mine.status_code, others.status_code) == (429, 200)
    assert "sequences" in mine.json()["error"]["message"]
    await asyncio.gather(*tasks)
    assert (await rig.held())["sequences"] == 0


async def test_bodies_share_their_memory(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Half-sent ones too; each API words the refusal as its own, and all is given back."""
    rig = Rig(engine, tmp_path, "", body_memory=200_000)
    sent, finish = asyncio.Event(), asyncio.Event()

    async def slow(first: int):
        yield b" " * first
        sent.set()
        await finish.wait()
        yield b'{"prompt": "x"}'

    async def upload(name: str, first: int) -> httpx.Response:
        headers = rig.keys[name] | {"content-type": "application/json"}
        return await rig.client.post("/v1/completions", content=slow(first), headers=headers)

    uploads = [asyncio.create_task(upload("ada", 90_000))]
    await sent.wait()
    large = "x" * 30_000
    refused = await rig.ask("ada", {**PROMPT, "prompt": large})
    assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
    assert (await rig.ask("bob", {**PROMPT, "prompt": "x" * 3000})).status_code == 200
    sent.clear()
    uploads.append(asyncio.create_task(upload("bob", 95_000)))
    await sent.wait()
    cases: tuple[tuple[str, dict[str, object], str], ...] = (
        ("/v1/completions", {**PROMPT, "prompt": "x" * 20_000}, "server_error"),
        ("/v1/messages", {**CHAT, "system": "x" * 20_000}, "overloaded_error"),
        ("/generate", {"inputs": "x" * 20_000}, "Service Unavailable"),
    )
    for path, body, error in cases:
        rig.keys["eve"] = {"authorization": f"Bearer {add_key(tmp_path / 'keys.toml', 'eve')}"}
        rig.app.state.access.reload_keys()
        answer = await rig.ask("eve", body, path)
        assert answer.status_code in (503, 529), answer.text
        assert error in answer.text
        assert "retry-after" in answer.headers
    finish.set()
    assert {answer.status_code for answer in await asyncio.gather(*uploads)} == {200}
    assert (await rig.held())["body_bytes"] == 0


async def test_metrics_and_the_dashboard_show_every_budget(engine: ScriptedEngine, tmp_path: Path) -> None:
    rig = Rig(engine, tmp_path, "max_concurrent = 1")
    headers = {"authorization": "Bearer root"}
    shown = (await rig.client.get("/metrics", headers=headers)).text
    for name in await rig.held():
        assert f'stemma_budget_limit{{budget="{name}"}}' in shown
        assert f'stemma_budget_refused_total{{budget="{name}",part="tenant"}} 0.0' in shown


async def test_a_compressed_body_is_415(engine: ScriptedEngine, tmp_path: Path) -> None:
    rig = Rig(engine, tmp_path, "")
    for path in ("/v1/completions", "/v1/messages", "/generate"):
        headers = rig.keys["ada"] | {"content-encoding": "gzip", "content-type": "application/json"}
        answer = await rig.client.post(path, content=b"\x1f\x8b", headers=headers)
        assert answer.status_code == 415
        assert "Content-Encoding" in answer.text
