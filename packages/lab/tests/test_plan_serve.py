"""`stemma plan` against `stemma serve`: a recorded trace predicts the counters of its own server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from packages.lab.tests.conversations import BLOCK_SIZE, chat

from stemma.cli.server_process import ServerProcess
from stemma.model.files.tiny import write_tiny_model

NUM_REQUESTS = 150


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--eviction", "lru"], ["--eviction-cost", "prefill-time"]], ids="_".join)
def test_predicted_hit_ratio_is_the_servers(tmp_path: Path, flags: list[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny", hidden_size=96, num_layers=1)
    trace, plan = tmp_path / "trace.jsonl", tmp_path / "plan.json"
    size = ["--kv-cache-memory", "500kB", "--block-size", str(BLOCK_SIZE), "--num-threads", "1"]
    with (
        ServerProcess(model, [*size, *flags, "--record-trace", str(trace)]) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        chat(client, NUM_REQUESTS)
        stats = client.get("/admin/stats").json()
    assert stats["num_evicted_blocks"] > 100
    live = stats["cached_tokens_by_tier"]["device"] / stats["num_prompt_tokens"]

    policy = flags[1] if flags[0] == "--eviction" else "hazard"
    layout = ["--gpu-memory", "500kB", "--policy", policy]
    command = [sys.executable, "-m", "stemma", "plan", str(model), "--trace", str(trace), *layout]
    subprocess.run([*command, "--json", str(plan)], check=True, capture_output=True)
    predicted = json.loads(plan.read_bytes())["base"]["token_hit_ratios"][0]
    print(f"live {live:.4f}, predicted {predicted:.4f}")
    assert predicted == pytest.approx(live, abs=0.01)
