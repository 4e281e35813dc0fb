"""What of the code a chat crosses whose prompt is cached: a ratchet that only turns towards less.

The goal is 90 files, 20 rooms and 150 changes of room. What is counted depends on the steps that a
threaded engine takes, so there is some room above what was measured: 129 files, 25 rooms, 279 to 288 changes.
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.e2e.conftest import Served, start_server
from tests.e2e.path_walk import profiled

MOST_FILES, MOST_ROOMS, MOST_CHANGES = 132, 25, 300
QUESTION = {"role": "user", "content": "tell me about trees and their leaves, please, " * 8}


def ask(served: Served, messages: list[dict[str, str]]) -> str:
    answer = served.post(
        "/v1/chat/completions", model="tiny", messages=messages, temperature=0, max_tokens=8
    ).json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_a_warm_chat_crosses_few_rooms_once(tiny_model: Path) -> None:
    with profiled(lambda: start_server(tiny_model, prepare_turns="on")) as (walk, (served, stop)):
        try:
            messages = [QUESTION]
            told = {"role": "assistant", "content": ask(served, messages)}
            messages += [told, {"role": "user", "content": "go on"}]
            ask(served, messages)
            time.sleep(1.0)  # idle time has done its work
            with walk.on():
                ask(served, messages)
        finally:
            stop()
    assert walk.calls_of("TurnBuilder.build") == 1
    assert walk.calls_of("GenerationRequest.__post_init__") == 1
    assert walk.calls_of("PrefixCache.reserve") == 1
    assert walk.calls_of("RadixIndex.match") <= 2, (
        "once for the prompt, and once where its answer is concluded"
    )
    assert len(walk.files) <= MOST_FILES
    assert len(walk.rooms) <= MOST_ROOMS
    assert sum(walk.changes.values()) <= MOST_CHANGES
