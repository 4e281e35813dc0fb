"""`/metrics`: vLLM's names have our values, and a request is counted once."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import Settings
from stemma.engine.api import EngineStats
from stemma.errors import ConfigError
from stemma.server.app import create_app
from stemma.server.observe.metrics import Throughput
from tests.server.scripted_engine import ScriptedEngine


def samples_of(text: str) -> dict[str, float]:
    return {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}


async def test_vllm_names_have_our_values(client: httpx.AsyncClient) -> None:
    assert (await client.post("/generate", json={"inputs": "ab"})).status_code == 200
    samples = samples_of((await client.get("/metrics")).text)
    for theirs, ours in (
        ("vllm:prompt_tokens_total", "stemma_prompt_tokens_total"),
        ("vllm:prefix_cache_queries_total", "stemma_prompt_tokens_total"),
        ("vllm:generation_tokens_total", "stemma_generated_tokens_total"),
        ("vllm:num_preemptions_total", "stemma_preemptions_total"),
        ("vllm:e2e_request_latency_seconds_sum", "stemma_request_seconds_sum"),
        ("vllm:time_to_first_token_seconds_count", "stemma_time_to_first_token_seconds_count"),
    ):
        assert samples[theirs] == samples[ours]
    assert samples["vllm:prefix_cache_hits_total"] >= 40
    assert samples["vllm:kv_cache_usage_perc"] == pytest.approx(1 - 6 / 16)
    assert samples["stemma_time_to_first_token_by_cached_share_seconds_count"] == 1
    assert samples["stemma_tenant_requests_total"] == 1


async def test_other_names_can_be_left_out(engine: ScriptedEngine, settings: Settings) -> None:
    server = settings.server.model_copy(update={"metric_aliases": ("none",)})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost"
    ) as client:
        assert "vllm:" not in (await client.get("/metrics")).text


def test_an_unknown_name_is_refused(engine: ScriptedEngine, settings: Settings) -> None:
    server = ServerSettings(metric_aliases=("sglang",))
    with pytest.raises(ConfigError, match="sglang"):
        create_app(engine, settings.model_copy(update={"server": server}))


_BY_CLIENTS = {"stemma_tenant", "stemma_requests", "stemma_ignored_hints"}
"""Their labels come from requests."""


async def test_counts_begin_at_zero(client: httpx.AsyncClient) -> None:
    """An alert on an increase would miss the first burst of a series that begins with it."""
    text = (await client.get("/metrics")).text
    empty = {
        family.name
        for family in text_string_to_metric_families(text)
        if family.type == "counter" and not family.samples and not family.name.startswith(tuple(_BY_CLIENTS))
    }
    assert empty == set()


def test_throughput_is_that_since_the_last_look() -> None:
    now = 100.0
    throughput = Throughput(lambda: now)

    def rates(prompt: int, generated: int) -> tuple[float, float]:
        stats = EngineStats.__new__(EngineStats)
        object.__setattr__(stats, "num_prompt_tokens", prompt)
        object.__setattr__(stats, "num_generated_tokens", generated)
        return throughput.rates(stats)

    assert rates(5, 0) == (0.0, 0.0)
    now = 102.0
    assert rates(200, 20) == (100.0, 10.0)
    now = 102.5
    assert rates(200, 20) == (80.0, 8.0)  # too soon for a new span
    now = 112.0
    assert rates(300, 120) == (10.0, 10.0)
    now = 113.0
    assert rates(300, 120) == (0.0, 0.0)
