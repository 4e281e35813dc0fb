from __future__ import annotations

from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import EngineSettings, ModelSettings, Settings
from stemma.engine.api import EngineLoad
from stemma.server.app import create_app
from stemma.told import read_told
from tests.server.scripted_engine import ScriptedEngine


async def test_health_follows_draining(engine: ScriptedEngine, settings: Settings) -> None:
    app = create_app(engine, settings)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost"
    ) as client:
        assert (await client.get("/health")).status_code == 200
        app.state.lifecycle.draining = True
        assert (await client.get("/health")).status_code == 503
        refused = await client.post("/v1/completions", json={"model": "scripted", "prompt": "x"})
        assert refused.status_code == 503


async def test_health_tells_routers_load_and_what_is_served(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """And names nothing: the model, its template and its adapters are digests."""
    engine.load = EngineLoad(8, num_running=5, num_waiting=2, kv_in_use=0.25, row_s=0.001)
    answer = await client.get("/health")
    told = read_told(answer.content)
    assert told.load is not None
    assert told.serves is not None
    assert (told.load.seats, told.load.running, told.load.waiting, told.load.kv_in_use) == (8, 5, 2, 0.25)
    assert (told.load.row_s, told.load.seat_s) == (0.001, None)
    assert told.serves.block_size == 16
    assert len(told.serves.model) == len(told.serves.kv) == len(told.serves.template) == 16
    assert "scripted" not in answer.text
    body = {"prompt": "w1 w2", "max_tokens": 4, "ignore_eos": True}
    await client.post("/v1/completions", json=body)
    after = read_told((await client.get("/health")).content).load
    assert after is not None
    assert after.answer_tokens == 4.0


async def test_health_tells_routers_how_slow_tokens_come(client: httpx.AsyncClient) -> None:
    assert "decode_s_per_token" not in (await client.get("/health")).json()
    body = {"prompt": "w1 w2", "max_tokens": 4, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] > 1
    told = (await client.get("/health")).json()
    assert 0.0 < told["decode_s_per_token"] < 10.0


async def test_health_tells_why_the_engine_failed(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    engine.failure = "thread stemma-steps failed: ValueError: x"
    answer = await client.get("/health")
    assert answer.status_code == 503
    assert answer.json() == {"status": "failed", "reason": "thread stemma-steps failed: ValueError: x"}


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()

    assert [card["id"] for card in listed["data"]] == ["scripted"]
    assert (await client.get("/v1/models/scripted")).json() == listed["data"][0]
    assert (await client.get("/v1/models/or/other")).status_code == 404


async def test_another_name_of_the_model(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    engine.also_named = ("demo",)
    listed = (await client.get("/v1/models")).json()["data"]

    assert [(card["id"], card["root"]) for card in listed] == [("scripted", "scripted"), ("demo", "scripted")]
    assert (await client.get("/v1/models/demo")).json() == listed[1]
    answer = await client.post("/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": 2})
    assert answer.json()["model"] == "scripted"


async def test_metrics_count_tokens_by_tier_and_time_requests(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"model": "scripted", "prompt": "ab", "max_tokens": 5})
    await client.post("/v1/completions", json={"model": "scripted", "prompt": "ab", "n": 999})
    text = (await client.get("/metrics")).text

    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["stemma_cached_tokens_total", (("tier", "device"),)] == 41
    assert samples["stemma_cached_tokens_total", (("tier", "disk"),)] == 0
    assert samples["stemma_misses_total", (("reason", "cold"),)] == 2
    assert samples["stemma_draft_tokens_total", (("source", "mtp"),)] == 9
    assert samples["stemma_draft_tokens_accepted_total", (("source", "mtp"),)] == 7
    assert samples["stemma_draft_tokens_total", (("source", "tree"),)] == 0
    assert samples["stemma_device_blocks_free", ()] == 6
    assert samples["stemma_requests_total", (("api", "completions"), ("outcome", "ok"))] == 1
    for histogram in ("time_to_first_token", "time_per_output_token", "request", "queue_wait"):
        assert samples[f"stemma_{histogram}_seconds_count", ()] == 1
    assert samples["stemma_request_generated_tokens_sum", ()] == 5


async def test_stats_tree_and_flush(client: httpx.AsyncClient) -> None:
    await client.post("/generate", json={"inputs": "ab"})

    assert (await client.get("/admin/stats")).json()["cached_tokens_by_tier"] == {"device": 41}
    assert "up to 9 tokens" in (await client.get("/admin/cache/tree?max_tokens=9")).text
    assert (await client.get("/admin/cache/tree?max_tokens=none")).status_code == 400


async def test_api_key(engine: ScriptedEngine) -> None:
    settings = Settings(
        engine=EngineSettings(model=ModelSettings(path=Path("scripted"))),
        server=ServerSettings(api_key="s3cret"),
    )
    transport = httpx.ASGITransport(app=create_app(engine, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.post("/generate", json={"inputs": "x"})).json()["error_type"] == "Unauthorized"
        wrong = await client.get("/v1/models", headers={"authorization": "Bearer no"})
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        right = await client.get("/v1/models", headers={"authorization": "Bearer s3cret"})
        assert right.status_code == 200
