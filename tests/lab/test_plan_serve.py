"""`stemma plan` against `stemma serve`: a recorded trace predicts the counters of its own server."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from stemma.cli.server_process import ServerProcess
from stemma.model.tiny import write_tiny_model

BLOCK_SIZE = 16
NUM_REQUESTS = 150


def chat(client: httpx.Client, num_requests: int) -> None:
    """Conversations behind one system prompt that together don't fit in the cache."""
    random.seed(4)
    system = {"role": "system", "content": "You answer briefly. " * 12}
    talks: list[list[dict[str, str]]] = [[system] for _ in range(10)]
    for number in range(num_requests):
        talk = random.choice(talks)
        if len(talk) > 12:
            del talk[1:]
        words = " ".join(f"w{random.randrange(300)}" for _ in range(random.randrange(5, 25)))
        talk.append({"role": "user", "content": f"Question {number}: {words}"})
        body = {"model": "tiny", "messages": talk, "max_tokens": 6, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        talk.append(
            {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"] or "-"}
        )


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
