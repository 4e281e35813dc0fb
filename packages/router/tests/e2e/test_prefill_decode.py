"""Prefill and decode apart: two engines, one pool, the proxy in front; answers equal one server's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from stemma.cli.server_process import ServerProcess
from stemma.config.loading import load_settings
from stemma.engine.async_engine import AsyncEngine
from stemma.server.app import create_app
from stemma_router.routing.relay import RouteOptions
from stemma_router.routing.route import create_route_app

PROMPT = "Please write a letter to the city about the park, the trees, the lights and the benches. "
OPTIONS = RouteOptions(max_body_bytes=1_000_000, admin_key="s3cret")
ADMIN = {"authorization": "Bearer s3cret"}


@pytest.fixture
def pool_config(tmp_path: Path) -> Path:
    file = tmp_path / "pool.json"
    file.write_text(json.dumps({"path": str(tmp_path / "pool")}))
    return file


def flags_of(role: str, pool_config: Path, kv_dtype: str = "auto") -> dict[str, object]:
    return {
        "role": role,
        "pool": "directory",
        "pool_config": pool_config,
        "kv_cache_memory": "2MB",
        "block_size": 16,
        "num_threads": 1,
        "load_timeout_s": 20.0,
        "kv_cache_dtype": kv_dtype,
    }


@pytest.fixture
async def route(
    tiny_model: Path, pool_config: Path, request: pytest.FixtureRequest
) -> AsyncIterator[httpx.AsyncClient]:
    """The proxy over a prefill and a decode engine, all in this process; its parameter is the KV's dtype."""
    kv_dtype = getattr(request, "param", "auto")
    engines, mounts = [], {}
    for role in ("prefill", "decode"):
        settings = load_settings(flags={"model": tiny_model, **flags_of(role, pool_config, kv_dtype)})
        engines.append(AsyncEngine.from_settings(settings.engine))
        mounts[f"http://{role}.localhost"] = httpx.ASGITransport(create_app(engines[-1], settings))
    upstream = httpx.AsyncClient(mounts=mounts, timeout=60)
    app = create_route_app(["http://prefill.localhost"], ["http://decode.localhost"], upstream)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        client.upstream = upstream  # type: ignore[attr-defined]
        yield client
    await upstream.aclose()
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("route", ["auto", "int8"], indirect=True)
async def test_answers_equal_one_servers_and_only_one_prompt_token_is_computed(
    route: httpx.AsyncClient,
) -> None:
    for turn in range(3):
        body = {
            "model": "tiny",
            "prompt": f"{turn} {PROMPT * (turn + 1)}",
            "max_tokens": 12,
            "temperature": 0,
        }
        answer = (await route.post("/v1/completions", json=body)).json()
        whole = await route.upstream.post("http://prefill.localhost/v1/completions", json=body)  # type: ignore[attr-defined]
        assert answer["choices"] == whole.json()["choices"]
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


async def test_chat_streams_and_generate(route: httpx.AsyncClient) -> None:
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    streamed = (await route.post("/v1/chat/completions", json=chat)).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    details = events[-1]["usage"]
    assert details["prompt_tokens_details"]["cached_tokens"] == details["prompt_tokens"] - 1
    assert streamed.rstrip().endswith("data: [DONE]")
    tgi = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "details": True}}
    answer = (await route.post("/generate", json=tgi)).json()
    assert answer["details"]["generated_tokens"] == 8


@pytest.fixture
def processes(tiny_model: Path, pool_config: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    made = []
    for role in ("prefill", "decode"):
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags_of(role, pool_config).items()]
        made.append(ServerProcess(tiny_model, words))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ServerProcess.start, made))
    yield made[0], made[1]
    for process in made:
        process.kill()


@pytest.mark.slow
async def test_killing_either_side(processes: tuple[ServerProcess, ServerProcess]) -> None:
    prefill, decode = processes
    app = create_route_app([prefill.url], [decode.url], options=OPTIONS)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        expected = httpx.post(f"{prefill.url}/v1/completions", json=body, timeout=60).json()["choices"]
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

        # The decode server dies while it generates: whole answers are computed again elsewhere.
        long = body | {"max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{decode.url}/v1/completions", json=long, timeout=60) as stream:
            next(stream.iter_lines())
            decode.kill()
        assert (await client.post("/v1/completions", json=body)).json()["choices"] == expected
        health = (await client.get("/health", headers=ADMIN)).json()
        assert health["num_fallbacks"] == 1
        assert set(health["servers"]) == {prefill.url, decode.url}
        assert health["num_decode_failures"] == 1

        # The prefill server dies: the decode server computes the prompt.
        decode.start()
        app = create_route_app([prefill.url], [decode.url], options=OPTIONS)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60
        ) as again:
            prefill.kill()
            other = body | {"prompt": "another prompt, which nobody has seen " * 5}
            answer = await again.post("/v1/completions", json=other)
            assert answer.status_code == 200
            assert len(answer.json()["choices"][0]["text"]) > 0
            assert (await again.get("/health", headers=ADMIN)).json()["num_prefill_failures"] == 1
