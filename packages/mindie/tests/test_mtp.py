"""Multi-token prediction over HTTP, asked for as MindIE's manual does."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from tests.checkpoints import build_mtp
from tests.e2e.conftest import start_server

from stemma.config.loading import load_settings

SEED = '{"plugin_type":"mtp,prefix_cache","num_speculative_tokens": 1}'


def test_drafts_are_reported_by_source(tmp_path: Path) -> None:
    model = build_mtp(tmp_path / "weights")
    one = {"modelName": "tiny", "modelWeightPath": str(model), "plugin_params": SEED, "npuMemSize": 1}
    backend = {"ModelDeployConfig": {"maxSeqLen": 1024, "maxInputTokenLen": 512, "ModelConfig": [one]}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"ServerConfig": {"httpsEnabled": False}, "BackendConfig": backend}))
    engine = load_settings(file=config).engine
    assert engine.cache.enable_prefix_cache
    assert (engine.speculation.mode, engine.speculation.mtp_tokens) == ("mtp", 1)
    served, stop = start_server(
        model,
        served_name="tiny",
        speculation=engine.speculation.mode,
        speculation_mtp_tokens=engine.speculation.mtp_tokens,
        speculation_adaptive=False,
    )
    try:
        usage = [served.complete("A tree of words", max_tokens=20)["usage"] for _ in range(2)]
        assert usage[0]["stemma"]["drafts"]["mtp"]["drafted_tokens"] >= 8
        assert usage[1]["prompt_cache_hit_tokens"] == usage[1]["prompt_tokens"] - 1
        stats = served.stats()
        drafted = stats["drafts_by_source"]["mtp"]["num_proposed"]
        assert 0 < drafted <= stats["num_draft_tokens"]
        metrics = httpx.get(f"{served.url}/metrics").text
        assert f'stemma_draft_tokens_total{{source="mtp"}} {float(drafted)}' in metrics
    finally:
        stop()
