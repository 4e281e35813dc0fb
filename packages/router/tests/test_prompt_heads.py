"""Prompts that begin alike, in every protocol, have one beginning: where the proxies send them."""

from __future__ import annotations

from typing import Any

from stemma_router.routing.prompts import has_images, head_of, max_output_of, num_characters, pooled_head_of


def test_all_turns_of_a_conversation_begin_alike() -> None:
    system = {"role": "system", "content": "Answer in one sentence."}
    question = {"role": "user", "content": "Why?"}
    first = {"messages": [system, question]}
    later = {"messages": [system, question, {"role": "assistant", "content": "So."}, question]}
    assert head_of(first) == head_of(later) != head_of({"messages": [question]})
    assert head_of({"prompt": list(range(3000))}) == head_of({"prompt": list(range(1500))})
    assert head_of({"inputs": "x"}) != head_of({"inputs": "y"})
    assert head_of(first) != head_of({"messages": [system, {"role": "user", "content": "How?"}]})
    odd: dict[str, Any] | None
    for odd in (None, {}, {"messages": []}, {"messages": [1]}, {"prompt": 3}, {"prompt": [["a"], ["b"]]}):
        assert isinstance(head_of(odd), bytes)


def test_the_tokens_that_answers_may_have() -> None:
    assert max_output_of({"max_tokens": 100}) == 100
    assert max_output_of({"max_tokens": 100, "max_completion_tokens": 300, "n": 3}) == 900
    assert max_output_of({"inputs": "x", "parameters": {"max_new_tokens": 7, "best_of": 2}}) == 14
    assert max_output_of({"max_output_tokens": 5, "parameters": "odd"}) == 5
    assert max_output_of({"max_tokens": 0}) == 0
    for odd in ({}, {"max_tokens": None}, {"max_tokens": True}, {"max_tokens": -1}, {"max_tokens": "9"}):
        assert max_output_of(odd) is None
    assert max_output_of({"max_tokens": 9, "n": 10**40}) == 9


def test_the_head_of_what_is_only_computed() -> None:
    assert pooled_head_of({"query": "q", "documents": ["a"]}) == pooled_head_of(
        {"query": "q", "documents": ["b"]}
    )
    assert pooled_head_of({"text_1": ["q"], "text_2": "a"}) == pooled_head_of({"query": "q"})
    assert pooled_head_of({"input": ["a", "b"]}) == pooled_head_of({"input": "a"})
    assert pooled_head_of({"input": [1, 2]}) == pooled_head_of({"input": [[1, 2], [3]]})
    odd_bodies: list[dict[str, object]] = [
        {},
        {"input": None},
        {"query": {}},
        {"input": []},
        {"input": [None]},
    ]
    for odd in odd_bodies:
        assert isinstance(pooled_head_of(odd), bytes)


def seen(question: str, image: str = "data:image/png;base64,AAAA") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": parts}]}


def test_questions_about_an_image_have_the_same_head() -> None:
    assert head_of(seen("Who?")) == head_of(seen("Where is that?"))
    assert head_of(seen("Who?")) != head_of(seen("Who?", "data:image/png;base64,BBBB"))
    assert has_images(seen("Who?")["messages"])
    assert not has_images([{"role": "user", "content": [{"type": "text", "text": "Who?"}]}, "odd"])


def test_an_image_costs_the_same_whatever_its_file_takes() -> None:
    large = seen("Who?", "data:image/png;base64," + "A" * 10**6)
    assert num_characters(large) == num_characters(seen("Who?")) < 10_000
