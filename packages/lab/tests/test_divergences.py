"""The costliest divergences of a window, by place and shape, and what a replay says moving a value saves."""

from __future__ import annotations

import numpy as np
import pytest

from stemma.engine.api import CacheReport, GenerationRequest
from stemma.insight.divergence_window import DivergenceWindow, WholePrompt
from stemma.prefix.explain import MissReason, Parting
from stemma.prefix.index import MAX_FOLLOWING
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.prefix.radix import RadixIndex
from stemma.types import Tier, TokenArray
from stemma_lab.divergence.report import find_divergences, sentence
from stemma_lab.divergence.whatif import CacheShape, cached_tokens, in_one_order, with_one_list

CACHE = CacheShape(block_size=16, capacity_blocks=100_000, policy="lru")
BODY = "You help the readers of the harbour library, and answer in one sentence. " * 20


def decode(ids) -> str:
    return bytes(ids).decode("latin-1")


def encode(text: str) -> TokenArray:
    return np.frombuffer(text.encode("latin-1"), dtype=np.uint8).astype(np.int32)


class Server:
    """An unbounded cache that says what the engine would say."""

    def __init__(self) -> None:
        self.index = RadixIndex(1)
        self.window = DivergenceWindow()
        self.num_cached = 0
        self.num_blocks = 0

    def ask(self, text: str, now: float, changed: str = "") -> None:
        tokens = encode(text)
        found = self.index.match(DEFAULT_NAMESPACE, tokens[:-1])
        fresh = np.arange(self.num_blocks, self.num_blocks + len(tokens) - found.num_tokens, dtype=np.int32)
        self.num_blocks += len(fresh)
        self.index.insert(DEFAULT_NAMESPACE, tokens, np.concatenate((found.block_ids, fresh)), now)
        parting, reason = None, MissReason.COLD
        if found.num_tokens:
            parting, reason = (
                Parting(found.num_tokens, tuple(found.following.tolist()[:MAX_FOLLOWING])),
                MissReason.DIVERGED,
            )
        self.num_cached += found.num_tokens
        report = CacheReport(len(tokens), {Tier.DEVICE: found.num_tokens}, reason.value, parting=parting)
        self.window.add(now, GenerationRequest(str(now), tokens), report, changed)


def stamped(n: int) -> str:
    return f"Now: 2026-11-20 08:{n:02d}:07. {BODY}Question {n}: why?"


def test_a_timestamp_in_front_is_the_costliest_and_its_saving_is_what_moving_it_saves():
    served, moved = Server(), Server()
    for n in range(40):
        served.ask(stamped(n), float(n))
        moved.ask(f"Now: . {BODY}Question {n}: why?2026-11-20 08:{n:02d}:07", float(n))
    report = find_divergences(served.window.snapshot(), decode, CACHE)
    first = report.divergences[0]
    assert (first.shape, first.first_token, first.end_token) == ("timestamp", 0, 64)
    assert first.num_requests >= 39
    assert first.num_missed_tokens > 0.9 * report.num_missed_tokens
    assert first.replayed is not None
    assert first.replayed.num_changed == 40
    saved = report.saved_tokens(first)
    assert saved == pytest.approx(moved.num_cached - served.num_cached, rel=0.02)
    text = sentence(report, first, 0.001)
    assert "part at a timestamp in the first 64 tokens: move it to the end" in text
    assert " min of prefill" in text or " s of prefill" in text


def test_own_words_are_counted_and_have_no_saving():
    served = Server()
    for n, words in enumerate(["please tell me", "write a story", "how are boats built"]):
        served.ask(BODY + words, float(n))
    report = find_divergences(served.window.snapshot(), decode, CACHE)
    assert [one.shape for one in report.divergences] == ["text"]
    assert report.divergences[0].first_token == 1024
    assert report.saved_tokens(report.divergences[0]) is None
    assert report.missed_tokens_by_reason["cold"] > report.missed_tokens_by_reason["diverged"]


def test_a_value_behind_which_all_differs_saves_nothing():
    served = Server()
    for n in range(6):
        tail = "".join(chr(97 + (n * 7 + k * (n + 1)) % 26) for k in range(200))
        served.ask(f"{BODY}at 08:{n:02d} {tail}", float(n))
    report = find_divergences(served.window.snapshot(), decode, CACHE)
    assert report.divergences[0].shape == "timestamp"
    saved = report.saved_tokens(report.divergences[0])
    assert saved is not None
    assert saved < 0.05 * report.num_missed_tokens


def test_the_window_in_seconds_and_an_empty_one():
    served = Server()
    for n in range(10):
        served.ask(stamped(n), float(n))
    assert find_divergences(served.window.snapshot(), decode, CACHE, since=5.0).num_requests == 5
    empty = find_divergences(DivergenceWindow().snapshot(), decode, CACHE)
    assert (empty.num_requests, empty.divergences) == (0, [])


def test_the_window_is_bounded_in_requests_prompts_and_tokens():
    window = DivergenceWindow(max_records=8, max_prompts=4, max_prompt_tokens=100)
    for n in range(20):
        request = GenerationRequest(str(n), np.full(30, n, dtype=np.int32))
        window.add(float(n), request, CacheReport(30, {}, "cold"))
    held = window.snapshot()
    assert held.records["at"].tolist() == [float(n) for n in range(12, 20)]
    assert [prompt.at for prompt in held.prompts] == [17.0, 18.0, 19.0]
    assert (len(window), window.num_prompt_tokens) == (8, 90)
    window.add(20.0, GenerationRequest("long", np.zeros(101, dtype=np.int32)), CacheReport(101, {}, "cold"))
    assert window.num_prompt_tokens <= 100
    assert DivergenceWindow().num_bytes < 8 << 20


@pytest.mark.parametrize("policy", ["lru", "hazard", "retention"])
def test_a_replay_keeps_to_its_capacity(policy: str):
    rng = np.random.default_rng(1)
    prompts = [
        WholePrompt(float(n), DEFAULT_NAMESPACE, encode(BODY[: rng.integers(20, 300)] + f"{n % 7}" * 40))
        for n in range(60)
    ]
    roomy = sum(cached_tokens(prompts, CacheShape(16, 10_000, policy)))
    tight = sum(cached_tokens(prompts, CacheShape(16, 6, policy)))
    assert 0 <= tight < roomy


def with_tools(names: str, number: int) -> str:
    tools = "".join(f"<tool {name}: {name * 60}>" for name in names)
    return f"Tools: {tools}\n{BODY}Question {number}: why?"


def test_tools_in_another_order_tell_what_one_order_saves():
    """Each of six prompts has the same tools as the first, four in an order of their own."""
    orders = ["abc", "bac", "abc", "bca", "cab", "cba"]
    server, ordered = Server(), Server()
    for number, names in enumerate(orders):
        changed = "tools reordered" if number and names != "abc" else ""
        server.ask(with_tools(names, number), float(number), changed)
        ordered.ask(with_tools("abc", number), float(number))
    report = find_divergences(server.window.snapshot(), decode, CACHE)
    costliest = report.divergences[0]
    assert costliest.shape == "tools reordered"
    assert costliest.replayed is not None
    assert costliest.replayed.num_changed == 4
    saved = ordered.num_cached - server.num_cached
    found = costliest.replayed.num_cached_tokens_moved - costliest.replayed.num_cached_tokens
    assert found == pytest.approx(saved, abs=6 * CACHE.block_size)
    told = sentence(report, costliest, 0.001)
    assert "the same tools in another order in the first 64 tokens: give all of them one order" in told
    assert "would have saved" in told


def test_other_tools_are_left_as_they_are():
    prompts = [
        WholePrompt(float(number), DEFAULT_NAMESPACE, encode(with_tools(names, 0)))
        for number, names in enumerate(("abc", "abd", "bac"))
    ]
    place = len("Tools: <tool ")
    ordered, changed = in_one_order(prompts, [place, 10**6])
    assert changed == 1
    assert [bytes(one.tokens.astype(np.uint8)) for one in ordered] == [
        with_tools(names, 0).encode() for names in ("abc", "abd", "abc")
    ]


def edited(names: str, number: int) -> str:
    return with_tools(names, number).replace("<tool b: ", "<tool b, since today: ")


@pytest.mark.parametrize(
    "changed", [with_tools("abcd", 0), with_tools("ac", 0), with_tools("xabc", 0), edited("abc", 0)]
)
def test_a_changed_list_of_tools_tells_what_keeping_it_saves(changed: str):
    """One added last, one left out, one added first, one edited: each in every second of six prompts."""
    server, kept = Server(), Server()
    for number in range(6):
        text = (changed if number % 2 else with_tools("abc", 0)).replace("Question 0", f"Question {number}")
        server.ask(text, float(number), "tools" if number == 1 else "")
        kept.ask(with_tools("abc", number), float(number))
    report = find_divergences(server.window.snapshot(), decode, CACHE)
    one = next(one for one in report.divergences if one.shape == "tools")
    assert one.replayed is not None
    assert one.replayed.num_changed == 3
    num_tokens = {
        name: sum(len(p.tokens) for p in each.window.snapshot().prompts)
        for name, each in (("server", server), ("kept", kept))
    }
    saved = (num_tokens["server"] - server.num_cached) - (num_tokens["kept"] - kept.num_cached)
    found = one.replayed.num_cached_tokens_moved - one.replayed.num_cached_tokens
    assert found == pytest.approx(saved, abs=6 * CACHE.block_size)
    told = sentence(report, one, 0.001)
    assert "at a changed list of tools" in told
    assert "keep it as it was, or put those that change last; that would have saved" in told


def test_prompts_that_part_for_good_keep_their_tools():
    texts = [with_tools("abc", 0), "Tools: <tool x" + "y" * 200, with_tools("abc", 1)]
    prompts = [WholePrompt(float(n), DEFAULT_NAMESPACE, encode(text)) for n, text in enumerate(texts)]
    kept, changed = with_one_list(prompts, [len("Tools: <tool ")])
    assert changed == 0
    assert [bytes(one.tokens.astype(np.uint8)).decode() for one in kept] == texts
