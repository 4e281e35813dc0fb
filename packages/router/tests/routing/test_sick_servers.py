"""Real processes: with one sick server of two, clients notice nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from packages.router.tests.routing.asking import ask_many
from packages.router.tests.routing.processes import Process, become, health, router, sick_server


@pytest.fixture
def servers() -> Iterator[list[Process]]:
    made = [sick_server() for _ in range(2)]
    yield made
    for one in made:
        one.stop()


@pytest.fixture
def proxy(servers: list[Process]) -> Iterator[Process]:
    made = router(*(one.url for one in servers))
    yield made
    made.stop()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "mode",
    [
        *("500", "401", "draining", "garbage", "reset"),
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("503", "html", "empty")),
    ],
)
async def test_a_server_that_answers_badly_costs_no_request(
    servers: list[Process], proxy: Process, mode: str
) -> None:
    """It answers at once, so it is always the least busy one."""
    become(servers[0], mode)
    assert await ask_many(proxy.url, 150) == {"ok": 150}
    if mode in ("500", "html", "empty", "garbage", "reset"):
        assert become(servers[0], "well") < 40, "it is left alone but for a probe"


async def test_a_server_that_is_killed_costs_no_request_and_its_successor_is_found(
    servers: list[Process], proxy: Process
) -> None:
    asking = asyncio.create_task(ask_many(proxy.url, 400))
    await asyncio.sleep(0.5)
    servers[0].process.kill()
    assert await asking == {"ok": 400}


@pytest.mark.slow
async def test_a_server_that_recovers_is_asked_again(servers: list[Process], proxy: Process) -> None:
    become(servers[0], "500")
    assert await ask_many(proxy.url, 60) == {"ok": 60}
    before = become(servers[0], "well")
    async with asyncio.timeout(30):
        while become(servers[0], "well") < before + 20:
            assert await ask_many(proxy.url, 60, first=1000) == {"ok": 60}
    assert health(proxy)["servers"] == {one.url: "healthy" for one in servers}


@pytest.mark.slow
async def test_a_stopped_server_holds_nobody_for_long(servers: list[Process], proxy: Process) -> None:
    """SIGSTOP of one of two, with requests under way: all are answered, streamed or not."""
    assert await ask_many(proxy.url, 40) == {"ok": 40}
    os.kill(servers[0].pid, signal.SIGSTOP)
    async with asyncio.timeout(40):
        assert await ask_many(proxy.url, 300, at_once=24, first=100) == {"ok": 300}
    os.kill(servers[0].pid, signal.SIGCONT)
    async with asyncio.timeout(30):
        while health(proxy)["servers"] != {one.url: "healthy" for one in servers}:
            assert await ask_many(proxy.url, 20, first=1000) == {"ok": 20}  # one of them is its probe
            await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_a_hung_stream_is_told_to_be_broken(servers: list[Process], proxy: Process) -> None:
    """Both servers stop while a stream is under way: it isn't sent twice, and its client doesn't wait on."""
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"prompt": "x", "stream": True, "pause": 3.0}
        async with client.stream("POST", f"{proxy.url}/v1/completions", json=body) as answer:
            chunks = answer.aiter_text()
            assert "pid" in await anext(chunks)
            for one in servers:
                os.kill(one.pid, signal.SIGSTOP)
            async with asyncio.timeout(40):
                rest = "".join([chunk async for chunk in chunks])
    assert "stream_broken" in rest
    for one in servers:
        os.kill(one.pid, signal.SIGCONT)


@pytest.mark.slow
async def test_a_request_that_hangs_its_server_is_not_sent_to_all(
    servers: list[Process], proxy: Process
) -> None:
    """An unstreamed answer of unknown length has no limit while its server lives: it is computed once."""
    for one in servers:
        become(one, "hang")
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TimeoutException):
            await client.post(f"{proxy.url}/v1/completions", json={"prompt": "x"}, timeout=8)
    assert sum(become(one, "well") for one in servers) == 1


@pytest.mark.slow
async def test_a_whole_answer_is_waited_for_as_long_as_it_can_take_and_no_longer(
    servers: list[Process], proxy: Process
) -> None:
    """One server answers checks, and no requests. Before, a long answer that is slow is asked for once."""
    assert await ask_many(proxy.url, 20) == {"ok": 20}
    before = [become(one, "well") for one in servers]
    async with httpx.AsyncClient(timeout=90) as client:
        long = {"prompt": "x", "max_tokens": 20_000, "pause": 40.0}
        answer = await client.post(f"{proxy.url}/v1/completions", json=long)
        assert answer.status_code == 200
        assert sum(become(one, "well") for one in servers) == sum(before) + 1
        become(servers[0], "hang")
        short = [{"prompt": [n] * 50, "max_tokens": 16} for n in range(12)]
        asking = [client.post(f"{proxy.url}/v1/completions", json=body) for body in short]
        answers = await asyncio.gather(*asking)
        assert [one.status_code for one in answers] == [200] * 12
        assert become(servers[0], "well") > 0


@pytest.mark.slow
async def test_two_routers_side_by_side_agree_and_share_the_servers(
    servers: list[Process], proxy: Process
) -> None:
    """Their lists have another order. A conversation goes to one server, whichever router it meets."""
    other = router(*(one.url for one in reversed(servers)))
    try:
        async with httpx.AsyncClient(timeout=30) as client:
            for number in range(20):
                pids = set()
                for turn in range(4):
                    url = (proxy if turn % 2 else other).url
                    body = {"prompt": [number] * 100}
                    pids.add((await client.post(f"{url}/v1/completions", json=body)).json()["pid"])
                assert len(pids) == 1
        become(servers[0], "500")
        both = await asyncio.gather(ask_many(proxy.url, 100), ask_many(other.url, 100))
        assert sum(both, Counter()) == {"ok": 200}
    finally:
        other.stop()
