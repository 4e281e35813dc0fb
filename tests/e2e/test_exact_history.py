"""Two turns at temperature 1: nothing of an answer is computed again when it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import torch

from tests.adapters import write_adapter
from tests.e2e.conftest import Served, start_server

NUM_TOKENS = 60
FEW = 2
"""Tokens of an answer that may be computed: the last one drawn has no KV yet."""


def chat(served: Served, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    answer = served.post(
        "/v1/chat/completions", messages=messages, max_tokens=NUM_TOKENS, temperature=1, seed=5, **body
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def two_turns(served: Served, question: str, **body: Any) -> tuple[int, int, dict[str, Any]]:
    """Return how many tokens an answer has, how many were cached a turn later, and that turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    first = chat(served, messages, **body)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = chat(served, messages, **body)
    begin = first["usage"]["prompt_tokens"]
    cached = second["usage"]["prompt_cache_hit_tokens"]
    return first["usage"]["completion_tokens"], cached - begin, second


def test_an_answer_that_comes_back_is_reused_whole(served: Served) -> None:
    generated = reused = 0
    for number in range(12):
        num_generated, num_reused, second = two_turns(served, f"Question {number}: how deep is the river?")
        generated += num_generated
        reused += num_reused
        assert second["usage"]["stemma"]["exact_history_tokens"] >= num_generated - FEW
        assert num_reused >= num_generated - FEW
    assert reused >= 0.96 * generated  # of 60 tokens the last one was never computed


def test_without_it_the_text_is_tokenized_again(served: Served) -> None:
    num_generated, num_reused, second = two_turns(served, "How wide is it?", exact_history=False)
    assert num_reused < num_generated - FEW
    assert "exact_history_tokens" not in second["usage"]["stemma"]
    assert "re-tokenized at position" in second["usage"]["stemma"]["miss_detail"]


def test_a_salt_of_its_own_has_to_ask(served: Served) -> None:
    _, _, second = two_turns(served, "How old is it?", cache_salt="mine")
    assert "exact_history_tokens" not in second["usage"]["stemma"]
    _, _, asked = two_turns(served, "How old is it?", cache_salt="mine", exact_history=True)
    assert asked["usage"]["stemma"]["exact_history_tokens"]
    _, _, other = two_turns(served, "How old is it?", cache_salt="other")
    assert "exact_history_tokens" not in other["usage"]["stemma"]


def test_the_explanation_says_where_it_was_tokenized_again(served: Served) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Which way?"}]
    first = chat(served, messages, exact_history=False)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    chat(served, messages, exact_history=False)
    told = httpx.get(f"{served.url}/admin/explain").json()
    assert "re-tokenized at position" in str(told)


def test_an_adapter_has_answers_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(3)
    halves = (torch.randn(4, 96, generator=made), torch.randn(96, 4, generator=made))
    write_adapter(tmp_path / "poet", {"model.layers.0.self_attn.q_proj": halves})
    served, stop = start_server(tiny_model, lora_directories=[tmp_path])
    try:
        loaded = served.post("/v1/load_lora_adapter", lora_name="poet", lora_path=str(tmp_path / "poet"))
        assert loaded.status_code == 200, loaded.text
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Whose words are these?"}]
        first = chat(served, messages, model="poet")
        messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        assert "exact_history_tokens" not in chat(served, messages)["usage"]["stemma"]
        second = chat(served, messages, model="poet")["usage"]
    finally:
        stop()
    assert second["stemma"]["exact_history_tokens"] >= NUM_TOKENS - FEW
    assert second["prompt_cache_hit_tokens"] >= first["usage"]["prompt_tokens"] + NUM_TOKENS - FEW


def test_a_flush_drops_all_answers(tiny_model: Path, tmp_path: Path) -> None:
    served, stop = start_server(tiny_model, disk_cache=tmp_path / "disk", disk_cache_size="64MB")
    try:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What stays after a flush?"}]
        messages += [
            chat(served, messages)["choices"][0]["message"],
            {"role": "user", "content": "And then?"},
        ]
        [answers] = (tmp_path / "disk").rglob("answers")
        assert served.post("/admin/cache/flush").json()["num_dropped_answers"] == 1
        assert answers.stat().st_size < 100
        assert "exact_history_tokens" not in chat(served, messages)["usage"]["stemma"]
    finally:
        stop()


def test_a_restart_remembers(tiny_model: Path, tmp_path: Path) -> None:
    flags = {"disk_cache": tmp_path / "disk", "disk_cache_size": "64MB"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What stays after a restart?"}]
    served, stop = start_server(tiny_model, **flags)
    try:
        first = chat(served, messages)
    finally:
        stop()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    served, stop = start_server(tiny_model, **flags)
    try:
        second = chat(served, messages)
    finally:
        stop()
    assert second["usage"]["stemma"]["exact_history_tokens"] >= NUM_TOKENS - FEW
    assert second["usage"]["stemma"]["cached_tokens_by_tier"]["disk"] >= first["usage"]["prompt_tokens"]
