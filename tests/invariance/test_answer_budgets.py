"""Where answers wait for memory, or are refused and asked again, they are those of requests alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest

from stemma.model.files.tiny import write_tiny_model
from tests.e2e.conftest import Served, start_server


def hinted(*actions: tuple[str, dict[str, int]]) -> dict[str, Any]:
    listed = [
        {"action_id": name, "action_type": name, "action_version": "1", "payload": payload}
        for name, payload in actions
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": listed}


FEATURES: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "echo": {"echo": True},
    "n": {"n": 2},
    "stop": {"stop": ["e", "th"]},
    "grammar": {"structured_outputs": {"regex": "[a-c]{4,9}"}},
    "seed": {"temperature": 1.0, "seed": 7},
    "ids": {"return_token_ids": True},
    "penalties": {"frequency_penalty": 0.7},
    "session": {"prompt_cache_key": "one"},
    "stream": {"stream": True},
    "hints": {"kv_hints": hinted(("retain", {"priority": 90}), ("release", {"from_token": 8}))},
    "prewarm": {"kv_hints": hinted(("prewarm", {}))},
}
APART = (("prompt_logprobs", "stream"), ("hints", "prewarm"))
"""What is refused, and two values of one field."""
PAIRS = [pair for pair in combinations(FEATURES, 2) if pair not in APART]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden_size=96, num_layers=2)
    served, stop = start_server(model, answer_memory="100kB", max_answer_bytes="90kB")
    yield served
    stop()


def body_of(number: int, pair: tuple[str, str]) -> dict[str, Any]:
    prompt = f"The {number % 3} rivers of the north are long, and they {number % 5} flow to the sea."
    fields = FEATURES[pair[0]] | FEATURES[pair[1]]
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0.0} | fields


def choices_of(text: str, *, is_stream: bool) -> list[Any]:
    """Return what an answer says, however it was cut."""
    if not is_stream:
        return [
            {name: one for name, one in each.items() if one is not None}
            for each in json.loads(text)["choices"]
        ]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    joined: dict[int, str] = {}
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return sorted(joined.items())


def ask(server: Served, body: dict[str, Any]) -> tuple[list[Any], int]:
    """Return an answer, and how often it was refused for room before."""
    for num_refused in range(2000):
        answer = server.post("/v1/completions", **body)
        if answer.status_code in (429, 503):
            assert "bytes of answers" in answer.text, answer.text
            time.sleep(0.005)
            continue
        assert answer.status_code == 200, answer.text
        return choices_of(answer.text, is_stream=body.get("stream", False)), num_refused
    raise AssertionError("there never was room")


def test_answers_that_find_no_room_are_the_same_later(server: Served) -> None:
    """Every pair of what asks for memory, or for none, beside all others."""
    bodies = [body_of(number, pair) for number, pair in enumerate(PAIRS)]
    alone = [ask(server, body) for body in bodies]
    assert not any(refused for _, refused in alone)
    with ThreadPoolExecutor(10) as pool:
        beside = list(pool.map(lambda body: ask(server, body), bodies))
    for pair, (expected, _), (found, _) in zip(PAIRS, alone, beside, strict=True):
        assert found == expected, pair
    assert any(refused for _, refused in beside)


def test_what_no_answer_may_hold_is_refused_at_once(server: Served) -> None:
    refused = server.post("/v1/completions", prompt="x", max_tokens=100, n=4, logprobs=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
