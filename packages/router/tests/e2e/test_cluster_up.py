"""`stemma cluster up`: the pooling example of MindIE's manual, dp 2 and tp 2 on each side, from one file."""

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
from tests.checkpoints import build

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[4] / "examples" / "cluster" / "local" / "prefill-decode.yaml"
PRINTED = Path(__file__).parents[4] / "tests" / "data" / "mindie"
NUM_ANSWERED = 24
ADMIN = {"authorization": "Bearer s3cret", "content-type": "application/json"}


def round_of_the_dialogue(number: int) -> str:
    """Return the prompt of a curl command of the manual."""
    script = (PRINTED / f"curl_round_{number}.sh").read_text("utf-8")
    body: dict[str, Any] = json.loads(script[script.index("-d '") + 4 : script.rindex("'")])
    prompt: str = body["inputs"]
    return prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("deepseek-v3", tmp_path_factory.mktemp("weights") / "dsr1")


@pytest.fixture
def proxy(model: Path, tmp_path: Path) -> Iterator[str]:
    """The example's file with a tiny model of that family, a free port, and pools of this test."""
    content = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    settings = content["settings"]
    settings["model"]["path"] = str(model)
    settings["cache"]["kv_cache_memory"] = "16MB"
    settings["server"] |= {"port": 0, "admin_key": "s3cret"}
    settings["tiers"] = {"load_timeout_s": 20.0, "load_when": "always"}
    for number, pool in enumerate(content["prefill_decode"]["pools"]):
        config = tmp_path / pool["config"]
        config.write_text(json.dumps({"path": str(tmp_path / f"pool-{number}")}))
        pool["config"] = str(config)
    content["prefill_decode"]["log_dir"] = str(tmp_path / "logs")
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
    body = {"inputs": prompt, "parameters": {"max_new_tokens": NUM_ANSWERED, "do_sample": False}}
    got = httpx.post(f"{url}/generate", json=body, timeout=300)
    assert got.status_code == 200, got.text
    said: dict[str, Any] = got.json()
    return said["generated_text"]


def from_pool(url: str) -> int:
    """Tokens that an engine has taken from its pool."""
    return httpx.get(f"{url}/admin/stats", headers=ADMIN).json()["cached_tokens_by_tier"].get("pool", 0)


def test_the_second_round_of_the_dialogue_hits_the_pool_after_a_flush(
    proxy: str, model: Path, tmp_path: Path
) -> None:
    question, both = round_of_the_dialogue(1), round_of_the_dialogue(2)
    llm = LLM(model, kv_cache_memory="16MB", block_size=128, num_threads=1)
    params = SamplingParams(max_tokens=NUM_ANSWERED, temperature=0.0)
    num_question = len(llm.tokenizer.encode(question))
    assert num_question > 128
    expected = [llm.generate([prompt], params)[0].text for prompt in (question, both)]
    llm.close()

    assert answer(proxy, question) == expected[0]
    engines = list(httpx.get(f"{proxy}/health", headers=ADMIN).json()["servers"])
    decodes, prefills = engines[::2], engines[1::2]  # one of each for each pool
    assert sorted(map(from_pool, decodes)) == [0, num_question - 1]
    assert [from_pool(url) for url in prefills] == [0, 0]
    for url in prefills:
        httpx.post(f"{url}/admin/cache/flush", headers=ADMIN, json={}).raise_for_status()

    assert answer(proxy, both) == expected[1]
    assert sorted(map(from_pool, prefills)) == [0, num_question // 128 * 128]
    names = {f"{side}-{rank}.log" for side in ("prefill", "decode") for rank in range(2)}
    assert {file.name for file in (tmp_path / "logs").iterdir()} == names
    parts = [file.name.split("_")[1:3] for file in tmp_path.glob("pool-*/*/*/*")]
    assert parts.count(["0", "2"]) == parts.count(["1", "2"]) > num_question // 128
    assert len(parts) == 2 * parts.count(["0", "2"])
