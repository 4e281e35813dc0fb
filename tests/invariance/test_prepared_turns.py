"""Turns that idle time prepared are answered as without it, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import start_server
from tests.e2e.preparing import STRIPS, looked_at, wait_for_turns, write_model_with_template

WAYS: dict[str, dict[str, Any]] = {
    "no cache": {"enable_prefix_cache": False, "speculation": "off"},
    "cached": {},
    "prepared": {"prepare_turns": "on"},
    "prepared in part": {"prepare_turns": "on", "prepare_max_tokens": 21, "block_size": 4},
    "prepared in small chunks": {"prepare_turns": "on", "max_batch_tokens": 19, "host_cache": "1MB"},
}


def conversation(model: Path, flags: dict[str, Any]) -> list[Any]:
    """Return the answers of three turns with their log-probabilities."""
    served, stop = start_server(model, **flags)
    messages: list[dict[str, Any]] = []
    found: list[Any] = []
    try:
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}: how deep is it?"})
            asked: dict[str, Any] = {"max_tokens": 60, "temperature": 1, "seed": turn, "logprobs": True}
            answer = served.post("/v1/chat/completions", messages=messages, **asked)
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            if flags.get("prepare_turns") == "on":
                wait_for_turns(served, turn + 1)
                assert ("prepared_tokens" in answer.json()["usage"]["stemma"]) == (turn > 0)
            messages.append(choice["message"])
            found.append((choice["message"]["content"], choice["logprobs"]))
        if flags.get("prepare_turns") != "on":
            assert looked_at(served) == 0
    finally:
        stop()
    return found


def test_answers_do_not_depend_on_what_was_prepared(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_model_with_template(tmp_path_factory.mktemp("model") / "tiny", STRIPS)
    found = {way: conversation(model, flags) for way, flags in WAYS.items()}
    for way, answers in found.items():
        assert answers == found["no cache"], way
