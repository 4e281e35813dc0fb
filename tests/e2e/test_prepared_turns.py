"""Idle time prepares the next turn of a conversation: the turn then computes its new text alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stemma.model.tiny import write_tiny_model
from tests.e2e.conftest import Served, start_server

STRIPS = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' -%}{{ message.content.split('a', 1)[-1] }}"
    "{%- else -%}{{ message.content }}{%- endif -%}{{ '<|im_end|>' + '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant' + '\\n' }}{%- endif -%}"
)
"""Leaves out what an answer begins with, as templates do with thinking."""
QUESTION = {"role": "user", "content": "How deep is the river?"}
NEXT = {"role": "user", "content": "And then?"}
NUM_TOKENS = 100
GLUE = 16
"""Tokens that aren't worth a step of their own, with those around the new text."""


@pytest.fixture(scope="module")
def stripping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden_size=96, num_layers=2)
    for path in (model / "tokenizer_config.json", model / "chat_template.jinja"):
        if path.suffix == ".jinja":
            path.write_text(STRIPS)
        elif path.exists():
            config = json.loads(path.read_text()) | {"chat_template": STRIPS}
            path.write_text(json.dumps(config))
    return model


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
        time.sleep(0.3)
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


def metric(served: Served, name: str) -> float:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def looked_at(served: Served) -> float:
    return metric(served, "stemma_prepared_turns_total")


def wait_for_turns(served: Served, number: float) -> None:
    end = time.monotonic() + 20
    while looked_at(served) < number:
        assert time.monotonic() < end, "nothing was prepared"
        time.sleep(0.02)


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
    again = chat(idle, QUESTION, said(first), NEXT, max_tokens=4)["usage"]
    assert "prepared_tokens" not in again["stemma"]


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
    busy = threading.Thread(target=lambda: chat(idle, question("Long?"), max_tokens=2000))
    busy.start()
    while idle.stats()["num_running"] == 0:
        time.sleep(0.01)
    chat(idle, question("Short?"), max_tokens=40)
    time.sleep(0.3)
    if busy.is_alive():
        assert looked_at(idle) == before
        assert metric(idle, "stemma_prepared_tokens_total") == num_tokens
    busy.join()
    wait_for_turns(idle, before + 2)  # both, once it is idle


def test_a_request_ends_it_and_what_was_computed_stays(stripping: Path) -> None:
    served, stop = start_server(stripping, prepare_turns="on", kv_cache_memory="8MB")
    try:
        first = chat(served, QUESTION, max_tokens=3000)
        end = time.monotonic() + 20
        while not is_preparing(served):
            assert time.monotonic() < end, "it never began"
        other = chat(served, question("Is anybody there?"), max_tokens=1)
        assert other["usage"]["stemma"]["queue_wait_s"] < 1
        wait_for_turns(served, 1)
        assert metric(served, 'stemma_prepared_turns_total{outcome="cut"}') == 1
        num_tokens = metric(served, "stemma_prepared_tokens_total")
        assert 0 < num_tokens < 2900
        second = chat(served, QUESTION, said(first), NEXT, max_tokens=4)["usage"]
        assert second["stemma"]["prepared_tokens"] >= num_tokens - 1
    finally:
        stop()


def is_preparing(served: Served) -> bool:
    """Whether blocks are held though nothing runs."""
    stats = served.stats()
    return (
        stats["num_running"] == 0
        and stats["num_free_blocks"] + stats["num_cached_blocks"] < stats["num_blocks"]
    )


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
