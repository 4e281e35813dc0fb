"""`stemma advise` against `stemma serve`: advice is followed on a real server, and the gain is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from packages.lab.tests.conversations import BLOCK_SIZE, chat

from stemma.cli.server_process import ServerProcess
from stemma.model.files.tiny import write_tiny_model

NUM_REQUESTS = 150
SMALL = "500kB"


def served_hits(model: Path, *flags: str) -> float:
    """Send the traffic to a fresh server; return the share of prompt tokens from its cache."""
    given = ["--block-size", str(BLOCK_SIZE), "--num-threads", "1", "--eviction", "lru", *flags]
    with ServerProcess(model, given) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        chat(client, NUM_REQUESTS)
        stats = client.get("/admin/stats").json()
    return float(sum(stats["cached_tokens_by_tier"].values())) / stats["num_prompt_tokens"]


def advice(model: Path, trace: Path) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "stemma", "advise", str(trace), "--model", str(model), "--policy", "lru"]
    done = subprocess.run([*command, "--gpu-memory", SMALL, "--json"], check=True, capture_output=True)
    return {one["topic"]: one for one in json.loads(done.stdout)}


@pytest.mark.slow
def test_more_memory_brings_a_server_what_was_promised(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", hidden_size=96, num_layers=1)
    trace = tmp_path / "trace.jsonl"
    before = served_hits(model, "--kv-cache-memory", SMALL, "--record-trace", str(trace))
    found = advice(model, trace)["memory"]
    tier, size = found["setting"].replace(" ", "").split(":")
    assert tier == "device"
    after = served_hits(model, "--kv-cache-memory", size)
    promised = found["hits_after"] - found["hits_before"]
    print(f"before {before:.4f}, after {after:.4f}; promised {found['hits_after']:.4f}")
    assert promised > 0.05
    assert after - before == pytest.approx(promised, rel=0.2)


@pytest.mark.slow
def test_a_switched_off_cache_costs_nothing_where_it_was_advised(tmp_path: Path) -> None:
    """Prompts that share nothing: the advice is to switch the cache off, and it served nothing."""
    model = write_tiny_model(tmp_path / "tiny", hidden_size=96, num_layers=1)
    trace = tmp_path / "trace.jsonl"
    flags = ["--block-size", str(BLOCK_SIZE), "--num-threads", "1", "--kv-cache-memory", SMALL]
    with (
        ServerProcess(model, [*flags, "--record-trace", str(trace)]) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        for number in range(40):
            body = {"model": "tiny", "prompt": f"{number} " * 40, "max_tokens": 2, "temperature": 0}
            assert client.post("/v1/completions", json=body).status_code == 200
        stats = client.get("/admin/stats").json()
    found = advice(model, trace)["worth"]
    assert found["setting"] == "enable_prefix_cache = false"
    assert sum(stats["cached_tokens_by_tier"].values()) / stats["num_prompt_tokens"] < 0.02
