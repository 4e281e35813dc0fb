"""A client that leaves frees what it held. Over real sockets: only they can be closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest

from tests.server.scripted_engine import ScriptedEngine


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("url", ["/v1/completions", "/generate_stream"])
async def test_leaving_in_mid_stream_aborts(live_url: str, engine: ScriptedEngine, url: str) -> None:
    engine.script.delay_s = 0.02
    body = {"model": "scripted", "prompt": "ab", "max_tokens": 4000, "stream": True, "inputs": "ab"}
    if url == "/generate_stream":
        body["parameters"] = {"max_new_tokens": 4000}
    async with httpx.AsyncClient() as client, client.stream("POST", live_url + url, json=body) as response:
        async for _ in response.aiter_bytes():
            break
        assert len(engine.active) == 1
    await eventually(lambda: not engine.active and len(engine.aborted) == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token_aborts(
    live_url: str, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script.delay_s = 30.0
    body = {"model": "scripted", "prompt": ["ab", "cd", "ef"], "stream": stream}
    async with httpx.AsyncClient() as client:
        request = asyncio.create_task(client.post(f"{live_url}/v1/completions", json=body))
        await eventually(lambda: len(engine.active) == 3)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await eventually(lambda: not engine.active and len(engine.aborted) == 3)


async def test_one_failing_prompt_ends_its_siblings(live_url: str, engine: ScriptedEngine) -> None:
    engine.script.capacity_tokens = 3
    engine.script.delay_s = 0.01
    async with httpx.AsyncClient() as client:
        response = await client.post(
            f"{live_url}/v1/completions",
            json={"model": "scripted", "prompt": ["ab", "abcd"], "max_tokens": 4000},
        )
    assert response.status_code == 400
    assert not engine.active


async def test_a_finished_request_is_not_aborted(live_url: str, engine: ScriptedEngine) -> None:
    async with httpx.AsyncClient() as client:
        for stream in (False, True):
            body = {"model": "scripted", "prompt": "ab", "stream": stream}
            await client.post(f"{live_url}/v1/completions", json=body)
    assert engine.aborted == []
