"""MindIE's names in `/metrics`, with the label that its dashboards use."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.scripted_engine import ScriptedEngine

from stemma.config.server_settings import RequestSettings
from stemma.config.settings import Settings
from stemma.server.app import create_app


async def test_names_and_values(engine: ScriptedEngine, settings: Settings) -> None:
    mindie = settings.model_copy(update={"requests": RequestSettings(dialect="mindie")})
    transport = httpx.ASGITransport(app=create_app(engine, mindie))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/generate", json={"inputs": "ab"})).status_code == 200
        engine.script.overloaded = True
        assert (await client.post("/generate", json={"inputs": "ab"})).status_code == 503
        text = (await client.get("/metrics")).text

    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("model_name") == "scripted"
    }
    assert samples["request_received_total"] == 2
    assert samples["request_success_total"] == samples["request_failed_total"] == 1
    assert samples["failed_request_perc"] == 0.5
    assert samples["prompt_tokens_total"] == samples["all_radix_match_num"] == 100
    assert samples["npu_prefix_cache_hit_rate"] == pytest.approx(samples["npu_radix_match_hit_num"] / 100)
    assert samples["npu_cache_usage_perc"] == pytest.approx(1 - 6 / 16)
    assert samples["time_to_first_token_seconds_count"] == 1
    assert samples["e2e_request_latency_seconds_count"] == 1


async def test_other_servers_have_their_own_names_only(client: httpx.AsyncClient) -> None:
    assert "npu_prefix_cache_hit_rate" not in (await client.get("/metrics")).text
