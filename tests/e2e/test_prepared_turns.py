"""Idle time prepares the next turn of a conversation: the turn then computes its new text alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Served, start_server
from tests.e2e.preparing import STRIPS, looked_at, metric, wait_for_turns, write_model_with_template

QUESTION = {"role": "user", "content": "How deep is the river?"}
NEXT = {"role": "user", "content": "And then?"}
NUM_TOKENS = 100
GLUE = 16
"""Tokens that aren't worth a step of their own, with those around the new text."""


@pytest.fixture(scope="module")
def stripping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_with_template(tmp_path_factory.mktemp("model") / "tiny", STRIPS)


@pytest.fixture(scope="module")
def server(stripping: Path) -> Iterator[Served]:
    served, stop = start_server(stripping, prepare_turns="on")
    yield served
    stop()


@pytest.fixture
def idle(server: Served) -> Served:
    """The server once it has looked at the turns of the test before."""
    number = -1.0
    while number != (number := looked_at(server)):
        time.sleep(1.2)  # longer than a busy server rests
    return server


def chat(served: Served, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 1, "seed": 5, "ignore_eos": True} | body
    answer = served.post("/v1/chat/completions", messages=list(messages), **asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def said(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


def question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_the_second_turn_computes_the_new_text_only(idle: Served) -> None:
    before, num_prompts = looked_at(idle), idle.stats()["num_prompt_tokens"]
    first = chat(idle, QUESTION)
    wait_for_turns(idle, before + 1)
    assert idle.stats()["num_prompt_tokens"] == num_prompts + first["usage"]["prompt_tokens"]
    second = chat(idle, QUESTION, said(first), NEXT, max_tokens=4)["usage"]
    assert second["stemma"]["prepared_tokens"] > NUM_TOKENS / 3
    assert second["prompt_cache_miss_tokens"] <= GLUE
    assert metric(idle, "stemma_prepared_tokens_used_total") >= second["stemma"]["prepared_tokens"]
    told = httpx.get(f"{idle.url}/admin/explain").json()
    assert told["prepared_tokens"] == second["stemma"]["prepared_tokens"]
    assert f"Idle time prepared {told['prepared_tokens']} of the cached tokens" in told["detail"]
    again = chat(idle, QUESTION, said(first), NEXT, max_tokens=4)["usage"]
    assert "prepared_tokens" not in again["stemma"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("api", ["messages", "responses"])
def test_other_apis_are_prepared_too(idle: Served, api: str) -> None:
    before = looked_at(idle)
    text = f"How wide is it, over {api}?"
    if api == "messages":
        asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 1, "ignore_eos": True, "seed": 5}
        first = idle.post("/v1/messages", messages=[question(text)], **asked).json()
        turns = [question(text), {"role": "assistant", "content": first["content"]}, NEXT]
        wait_for_turns(idle, before + 1)
        usage = idle.post("/v1/messages", messages=turns, max_tokens=4).json()["usage"]
        num_computed = usage["input_tokens"]
    else:
        asked = {"max_output_tokens": NUM_TOKENS, "temperature": 1, "ignore_eos": True, "seed": 5}
        first = idle.post("/v1/responses", input=[question(text)], **asked).json()
        wait_for_turns(idle, before + 1)
        asked = {"input": [NEXT], "previous_response_id": first["id"], "max_output_tokens": 4}
        usage = idle.post("/v1/responses", **asked).json()["usage"]
        num_computed = usage["input_tokens_details"]["cache_write_tokens"]
    assert usage["stemma"]["prepared_tokens"] > NUM_TOKENS / 3
    assert num_computed <= GLUE


def test_a_salt_keeps_its_own(idle: Served) -> None:
    before = looked_at(idle)
    first = chat(idle, question("Whose is it?"), cache_salt="mine")
    wait_for_turns(idle, before + 1)
    turns = (question("Whose is it?"), said(first), NEXT)
    assert "prepared_tokens" not in chat(idle, *turns, max_tokens=4)["usage"]["stemma"]
    mine = chat(idle, *turns, max_tokens=4, cache_salt="mine")["usage"]
    assert mine["stemma"]["prepared_tokens"] > NUM_TOKENS / 3
    assert mine["prompt_cache_miss_tokens"] <= GLUE


def test_nothing_is_prepared_while_the_server_is_busy(idle: Served) -> None:
    before, num_tokens = looked_at(idle), metric(idle, "stemma_prepared_tokens_total")
    busy = threading.Thread(target=lambda: chat(idle, question("Long?"), max_tokens=3000))
    busy.start()
    while idle.stats()["num_running"] == 0:
        time.sleep(0.01)
    messages = [question("Short?")]
    for _ in range(2):
        messages += [said(chat(idle, *messages, max_tokens=40)), NEXT]
    counts = looked_at(idle), metric(idle, "stemma_prepared_tokens_total")
    was_busy = idle.stats()["num_running"] == 1
    busy.join()
    if was_busy:  # else the machine is too fast for this to show anything
        assert counts == (before, num_tokens)
        wait_for_turns(idle, before + 2)
        time.sleep(0.3)
        assert looked_at(idle) == before + 2  # the first of the two turns is over


def test_the_budget_bounds_it(stripping: Path) -> None:
    served, stop = start_server(stripping, prepare_turns="on", prepare_max_tokens=32)
    try:
        first = chat(served, QUESTION)
        wait_for_turns(served, 1)
        assert metric(served, "stemma_prepared_tokens_total") == 32
        second = chat(served, QUESTION, said(first), NEXT, max_tokens=4)["usage"]
        assert second["stemma"]["prepared_tokens"] == 32
    finally:
        stop()


def test_off_means_off(stripping: Path) -> None:
    served, stop = start_server(stripping, prepare_turns="off")
    try:
        first = chat(served, QUESTION)
        time.sleep(0.4)
        assert looked_at(served) == 0
        second = chat(served, QUESTION, said(first), NEXT, max_tokens=4)["usage"]
        assert second["prompt_cache_miss_tokens"] > NUM_TOKENS / 3
    finally:
        stop()


def test_a_restart_finds_what_was_prepared(stripping: Path, tmp_path: Path) -> None:
    flags = {"prepare_turns": "on", "disk_cache": tmp_path / "disk", "disk_cache_size": "64MB"}
    served, stop = start_server(stripping, **flags)
    try:
        first = chat(served, QUESTION)
        wait_for_turns(served, 1)
    finally:
        stop()
    served, stop = start_server(stripping, **flags)
    try:
        second = chat(served, QUESTION, said(first), NEXT, max_tokens=4)["usage"]
    finally:
        stop()
    assert second["prompt_cache_miss_tokens"] <= GLUE + 16  # the last block wasn't full
    assert second["stemma"]["cached_tokens_by_tier"]["disk"] > NUM_TOKENS / 3
