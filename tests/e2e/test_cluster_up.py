"""`stemma cluster up`: two data-parallel ranks of prefill and of decode over two pools, from one file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster" / "local" / "prefill-decode.yaml"
QUESTION = (
    "Question: Parents have complained to the principal about bullying during recess. The principal wants to "
    "quickly resolve this, instructing recess aides to be vigilant. Which situation should the aides report "
    "to the principal?\na) An unengaged girl is sitting alone on a bench, engrossed in a book and showing no "
    "interaction with her peers.\nb) Two boys engaged in a one-on-one basketball game are involved in a "
    "heated argument regarding the last scored basket.\nAnswer:"
)
NEXT = "\nQuestion: If the aides confront the boys and they deny it, what should the aides look for?\nAnswer:"
ADMIN = {"authorization": "Bearer s3cret", "content-type": "application/json"}


@pytest.fixture
def proxy(tiny_model: Path, tmp_path: Path) -> Iterator[str]:
    """The example's file with a tiny model, smaller blocks, and pools of this test."""
    content = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    content["settings"]["model"]["path"] = str(tiny_model)
    content["settings"]["cache"] = {"block_size": 16, "kv_cache_memory": "4MB"}
    content["settings"]["server"] |= {"port": 0, "admin_key": "s3cret"}
    content["settings"]["tiers"] = {"load_timeout_s": 20.0, "load_when": "always"}
    for number, pool in enumerate(content["prefill_decode"]["pools"]):
        config = tmp_path / pool["config"]
        config.write_text(json.dumps({"path": str(tmp_path / f"pool-{number}")}))
        pool["config"] = str(config)
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(content))
    process = subprocess.Popen(
        [sys.executable, "-m", "stemma", "cluster", "up", str(file)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if line.startswith("Ready:")), "")
        assert ready, process.wait(60)
        yield ready.split()[1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def answer(url: str, prompt: str) -> str:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 24, "do_sample": False}}
    got = httpx.post(f"{url}/generate", json=body, timeout=120)
    assert got.status_code == 200, got.text
    said: dict[str, Any] = got.json()
    return said["generated_text"]


def from_pool(url: str) -> int:
    """Tokens that an engine has taken from its pool."""
    return httpx.get(f"{url}/admin/stats", headers=ADMIN).json()["cached_tokens_by_tier"].get("pool", 0)


def test_the_second_round_of_a_dialogue_hits_the_pool_after_a_flush(proxy: str, tiny_model: Path) -> None:
    llm = LLM(tiny_model, kv_cache_memory="8MB", num_threads=1)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    expected = llm.generate([QUESTION], params)[0].text
    first = answer(proxy, QUESTION)
    assert first == expected
    engines = list(httpx.get(f"{proxy}/health", headers=ADMIN).json()["servers"])
    decodes, prefills = engines[:2], engines[2:]
    assert sum(from_pool(url) > 100 for url in decodes) == 1
    assert [from_pool(url) for url in prefills] == [0, 0]
    for url in prefills:
        httpx.post(f"{url}/admin/cache/flush", headers=ADMIN, json={}).raise_for_status()
    second = QUESTION + first + NEXT
    assert answer(proxy, second) == llm.generate([second], params)[0].text
    llm.close()
    assert sum(from_pool(url) > 100 for url in prefills) == 1
