"""With exact history and without, a conversation's answers don't depend on what was cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stemma.model.files.tiny import write_tiny_model
from tests.e2e.conftest import start_server

WAYS: dict[str, dict[str, Any]] = {
    "no cache": {"enable_prefix_cache": False, "speculation": "off"},
    "device": {},
    "little room": {"kv_cache_memory": "300kB", "host_cache": "1MB"},
    "small chunks": {"max_batch_tokens": 19, "block_size": 4},
}


def conversations(model: Path, flags: dict[str, Any], *, exact: bool) -> list[list[str]]:
    """Return the answers of three conversations of three turns, one turn of each after the other."""
    served, stop = start_server(model, exact_history="on" if exact else "off", **flags)
    told: list[list[dict[str, Any]]] = [[] for _ in range(3)]
    try:
        for turn in range(3):
            for number, messages in enumerate(told):
                messages.append({"role": "user", "content": f"Question {turn} of {number}: how deep is it?"})
                answer = served.post(
                    "/v1/chat/completions", messages=messages, max_tokens=30, temperature=1, seed=turn
                )
                assert answer.status_code == 200, answer.text
                usage = answer.json()["usage"]["stemma"]
                assert ("exact_history_tokens" in usage) == (exact and turn > 0)
                messages.append(answer.json()["choices"][0]["message"])
    finally:
        stop()
    return [[one["content"] for one in messages if one["role"] == "assistant"] for messages in told]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("exact", [True, False])
def test_answers_are_the_same_whatever_was_cached(
    tmp_path_factory: pytest.TempPathFactory, exact: bool
) -> None:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden_size=96, num_layers=2)
    found = {way: conversations(model, flags, exact=exact) for way, flags in WAYS.items()}
    for way, answers in found.items():
        assert answers == found["no cache"], way
