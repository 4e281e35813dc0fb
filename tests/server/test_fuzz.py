"""Over a real engine with a tiny cache and all tiers: schemathesis' requests, and valid but extreme ones.

No answer is a 5xx, and no block is lost.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from stemma.model.files.tiny import write_tiny_model
from tests.e2e.conftest import Served, start_server
from tests.generated_requests import document_of, send_generated

pytestmark = pytest.mark.slow
NUM_EXAMPLES = 15
"""Of each operation and mode."""
NUM_CLIENTS = 8
NUM_REQUESTS = 40
"""Of each client."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Blocks for a few hundred tokens on the device; host, disk and pool below it."""
    folder = tmp_path_factory.mktemp("fuzz")
    config = folder / "directory.json"
    config.write_text(json.dumps({"path": str(folder / "pool")}))
    model: Path = write_tiny_model(folder / "tiny", hidden_size=96, num_layers=2)
    server, stop = start_server(
        model,
        kv_cache_memory="1MB",
        max_model_len=256,
        host_cache="2MB",
        disk_cache=folder / "disk",
        disk_cache_size="8MB",
        pool="directory",
        pool_config=config,
        max_body_bytes="4MB",
        max_num_seqs=16,
        tokenize_timeout_s=10,
    )
    yield server
    stop()


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_generated_requests_are_never_server_errors(served: Served, mode: GenerationMode) -> None:
    """For each operation, bodies that fit the document and bodies that don't."""
    statuses: Counter[int] = Counter()

    def check(case: schemathesis.Case, response: Any) -> None:
        statuses[response.status_code] += 1
        if not (case.path == "/admin/pool" and response.status_code == 503):  # can't be attached
            case.validate_response(response, checks=[not_a_server_error])

    assert send_generated(document_of(served.url), mode, NUM_EXAMPLES, check) > 20
    assert statuses[200 if mode is GenerationMode.POSITIVE else 400] > 20, statuses


def test_nothing_is_lost_after_generated_requests(served: Served) -> None:
    check_blocks(served)


def check_blocks(served: Served) -> None:
    """Every block is in its place; without pins and requests a flush frees all of them."""
    asyncio.run(served.engine.check())
    pins = httpx.get(f"{served.url}/admin/cache/pins").json()["pins"]
    for pin in pins:
        assert served.post("/admin/cache/unpin", pin_id=pin["pin_id"]).status_code == 200
    assert served.post("/admin/cache/flush").status_code == 200
    stats = served.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"]
    asyncio.run(served.engine.check())


EXTREMES: dict[str, list[Any]] = {
    "max_tokens": [1, 2, 31, 2**31 - 1],
    "temperature": [0, 1e-300, 1e-4, 1.0, 100.0],
    "top_p": [1e-300, 0.5, 1.0],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "min_p": [0.0, 1e-300, 1.0],
    "repetition_penalty": [0.01, 1.0, 100.0],
    "frequency_penalty": [-2.0, 2.0],
    "presence_penalty": [-2.0, 2.0],
    "seed": [-(2**63), -1, 0, 2**63 - 1],
    "n": [1, 2, 7, 16],
    "stop": ["x", ["\x00"], ["e"] * 1024, ["y" * 32] * 1024, "日本"],
    "stop_token_ids": [[], [0], [2**31 - 1] * 1024],
    "min_tokens": [0, 1],
    "ignore_eos": [True, False],
    "cache_salt": ["", "a", "日" * 128, "\x00"],
    "cache_ttl_s": [1e-300, 1.0, 365 * 86_400.0],
    "priority": [0, 50, 100],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
    "logprobs": [0, 1, 20],
    "prompt_logprobs": [0, 1, 20],
    "return_token_ids": [True, False],
    "best_of": [1, 2, 16],
    "echo": [True],
    "use_beam_search": [True],
    "length_penalty": [-10.0, 10.0],
    "unknown": [{"a": [1]}],
}
TEXTS = [
    "x",
    "The quick brown fox. " * 3,
    "The quick brown fox. " * 8,
    "\x00",
    "日本語 \U0001f600" * 5,
    " " * 50,
]


def _completion(rng: random.Random) -> tuple[str, dict[str, Any]]:
    body = {name: rng.choice(EXTREMES[name]) for name in rng.sample(sorted(EXTREMES), rng.randrange(7))}
    prompts = [rng.choice(TEXTS), [rng.choice(TEXTS) for _ in range(3)], [1, 2, 3] * rng.randrange(1, 60)]
    return "/v1/completions", {**body, "prompt": rng.choice(prompts)}


def _chat(rng: random.Random) -> tuple[str, dict[str, Any]]:
    _, body = _completion(rng)
    for name in ("prompt", "echo", "logprobs"):
        body.pop(name, None)
    turns = [
        {"role": rng.choice(["user", "assistant", "odd"]), "content": rng.choice(TEXTS)} for _ in range(2)
    ]
    return "/v1/chat/completions", {**body, "messages": turns}


def _tgi(rng: random.Random) -> tuple[str, dict[str, Any]]:
    known = {"stop", "top_k", "repetition_penalty", "frequency_penalty", "best_of"}
    parameters = {name: rng.choice(EXTREMES[name]) for name in rng.sample(sorted(known), 2)}
    parameters |= {
        "max_new_tokens": rng.choice([1, 9, 2**31 - 1]),
        "truncate": rng.choice([1, 100, 2**31 - 1]),
    }
    parameters |= {"temperature": rng.choice([1e-300, 0.7]), "details": True}
    return rng.choice(["/generate", "/"]), {"inputs": rng.choice(TEXTS), "parameters": parameters}


def _admin(rng: random.Random) -> tuple[str, dict[str, Any]]:
    prompt = {"prompt": rng.choice(TEXTS), "cache_salt": rng.choice(EXTREMES["cache_salt"])}
    ttl = {"ttl_s": rng.choice([1e-300, 0.05, 365 * 86_400.0])}
    return rng.choice(
        [
            ("/admin/cache/lookup", prompt),
            ("/admin/cache/prewarm", {**prompt, **ttl, "pin": rng.random() < 0.3}),
            ("/admin/cache/pin", {**prompt, **ttl}),
            ("/admin/cache/flush", {}),
            ("/admin/cache/export", prompt),
        ]
    )


MAKERS: list[Callable[[random.Random], tuple[str, dict[str, Any]]]] = [
    _completion,
    _completion,
    _chat,
    _tgi,
    _admin,
]


def _client(url: str, number: int) -> tuple[int, list[str]]:
    """Send requests, leave some streams early; return how many were served, and what went wrong."""
    rng = random.Random(number)
    num_served, wrong = 0, []
    with httpx.Client(base_url=url, timeout=120) as client:
        for _ in range(NUM_REQUESTS):
            path, body = rng.choice(MAKERS)(rng)
            if path.startswith("/v1") and rng.random() < 0.3:
                with client.stream("POST", path, json={**body, "stream": True}) as response:
                    status = response.status_code
                    for _, line in zip(range(rng.randrange(6)), response.iter_lines(), strict=False):
                        if '"server_error"' in line:
                            wrong.append(f"{path} {body} {line}")
            else:
                response = client.post(path, json=body)
                status = response.status_code
            num_served += status == 200
            if status >= 500:
                wrong.append(f"{path} {body} {status}")
    return num_served, wrong


def test_valid_but_extreme_requests_from_eight_clients(served: Served) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        results = list(pool.map(lambda number: _client(served.url, number), range(NUM_CLIENTS)))
    assert [line for _, wrong in results for line in wrong] == []
    assert sum(count for count, _ in results) > 0.3 * NUM_CLIENTS * NUM_REQUESTS
    for _ in range(500):
        stats = served.stats()
        if stats["num_running"] == stats["num_waiting"] == 0:
            break
        time.sleep(0.02)
    check_blocks(served)
