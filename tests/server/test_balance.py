"""Where the proxy sends a prompt: by its beginning, and away from servers that are busy."""

from __future__ import annotations

from collections import Counter
from typing import Any

from stemma.server.routing.balance import Balance
from stemma.server.routing.prompts import head_of

URLS = [f"http://host-{name}:8000" for name in "abcd"]


def test_beginnings_are_spread_and_stay() -> None:
    balance = Balance(URLS)
    first = {n: balance.order(b"%d" % n)[0] for n in range(400)}
    assert all(60 < count < 140 for count in Counter(first.values()).values())
    assert first == {n: Balance(URLS[::-1]).order(b"%d" % n)[0] for n in range(400)}


def test_a_server_that_leaves_moves_only_its_own_share() -> None:
    whole, rest = Balance(URLS), Balance(URLS[:3])
    for n in range(200):
        before = whole.order(b"%d" % n)
        assert rest.order(b"%d" % n) == [url for url in before if url != URLS[3]]


def test_a_busy_server_is_passed_over_until_it_has_worked_off_its_lead() -> None:
    balance = Balance(URLS)
    favourite, second, *_ = balance.order(b"x")
    for _ in range(4):
        assert balance.order(b"x")[0] == favourite
        balance.begin(favourite)
    assert balance.order(b"x")[0] == second
    assert balance.order(b"x")[-1] == favourite
    balance.end(favourite)
    assert balance.order(b"x")[0] == favourite


def test_all_turns_of_a_conversation_begin_alike() -> None:
    system = {"role": "system", "content": "Answer in one sentence."}
    question = {"role": "user", "content": "Why?"}
    first = {"messages": [system, question]}
    later = {"messages": [system, question, {"role": "assistant", "content": "So."}, question]}
    assert head_of(first) == head_of(later) != head_of({"messages": [question]})
    assert head_of({"prompt": list(range(3000))}) == head_of({"prompt": list(range(1500))})
    assert head_of({"inputs": "x"}) != head_of({"inputs": "y"})
    assert head_of(first) != head_of({"messages": [system, {"role": "user", "content": "How?"}]})
    odd_ones: tuple[Any, ...] = (
        None,
        {},
        {"messages": []},
        {"messages": [1]},
        {"prompt": 3},
        {"prompt": [["a"], ["b"]]},
    )
    for odd in odd_ones:
        assert isinstance(head_of(odd), bytes)
