"""Tokens of several quick steps leave together: which are held, for how long, and that none is lost."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
from tests.engine.harness import greedy, prompt

from stemma.engine.api import GenerationRequest
from stemma.engine.core.request import Limits, RequestState, SequenceNews, SequenceState
from stemma.engine.output import joining
from stemma.engine.output.joining import NewsQueue
from stemma.engine.sampling.state import SamplingState
from stemma.errors import GenerationFailed
from stemma.types import FinishReason


class Steps:
    """A step loop by hand: a step takes `step_s` by its own clock and gives each sequence its next token."""

    def __init__(self, interval_s: float) -> None:
        self.now = 0.0
        self.step_s = 0.01
        self.queue = NewsQueue(lambda: self.now)
        self.queue.interval_s = interval_s
        self.sequences: dict[str, SequenceState] = {}

    def start(self, name: str, **options) -> None:
        request = GenerationRequest(name, prompt(1, 4), greedy(50, **options))
        state = RequestState(request, Limits((), 100).ending(request), arrival=0.0, order=0)
        sampling = SamplingState(request.params, request.prompt_token_ids, 500)
        self.sequences[name] = SequenceState(state, 0, sampling)
        state.sequences.append(self.sequences[name])

    def step(self, *, is_decode: bool = True, ends: str = "", error: GenerationFailed | None = None) -> None:
        self.queue.begin_step(is_decode)
        self.now += self.step_s
        news = []
        for name, sequence in list(self.sequences.items()):
            reason = None
            if name == ends:
                reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
                del self.sequences[name]
            sequence.num_output += 1
            tokens = () if reason is FinishReason.ERROR else (sequence.num_output,)
            news.append(SequenceNews(sequence.state, 0, tokens, finish_reason=reason, error=error))
        self.queue.end_step(news)

    def delivered(self) -> dict[str, list[int]]:
        """Return the tokens of the next delivery by request; the reader is then busy until it asks again."""
        news = self.queue.get()
        assert news is not None
        found: dict[str, list[int]] = {}
        for one in news:
            found.setdefault(one.state.request.request_id, []).extend(one.token_ids)
        return found

    def left(self) -> list[list[tuple[str, tuple[int, ...]]]]:
        """Return all further deliveries; nothing is held afterwards."""
        self.queue.pass_on()
        self.queue.close()
        found = []
        while (news := self.queue.get()) is not None:
            found.append([(one.state.request.request_id, one.token_ids) for one in news])
        return found


@pytest.fixture
def steps() -> Steps:
    """Steps of request "a" behind its first token, which the reader has; tokens may be held from now on."""
    steps = Steps(interval_s=0.035)
    steps.start("a")
    steps.step()
    steps.step()
    assert steps.delivered() == {"a": [1]}
    return steps


def sizes(deliveries) -> list[int]:
    return [len(one) for one in deliveries]


def test_tokens_of_quick_steps_leave_together_in_order(steps):
    for _ in range(30):
        steps.step()
    deliveries = steps.left()
    tokens = [token for one in deliveries for _, ids in one for token in ids]
    assert tokens == list(range(2, 33))
    assert set(sizes(deliveries[1:-1])) == {3}  # three steps of 10 ms end within 35 ms


@pytest.mark.parametrize(("step_s", "size"), [(0.006, 5), (0.016, 2), (0.018, 1), (0.1, 1)])
def test_held_no_longer_than_the_interval(steps, step_s, size):
    steps.step_s = step_s
    for _ in range(30):
        steps.step()
    assert set(sizes(steps.left()[3:-1])) == {size}


def test_nothing_is_held_without_an_interval():
    steps = Steps(interval_s=0.0)
    steps.start("a")
    for _ in range(10):
        steps.step()
    assert sizes(steps.left()) == [1] * 10


def test_nothing_is_held_while_the_reader_waits_without_limit(steps):
    """It would not look for it."""
    late = Steps(interval_s=0.035)
    late.start("a")
    for _ in range(10):
        late.step()
    assert sizes(late.left()) == [1] * 10


def test_a_first_and_a_last_token_leave_at_once_and_only_they(steps):
    steps.step_s = 0.001
    steps.step()
    steps.start("b")
    steps.step()  # b's first
    steps.step()
    steps.step(ends="b")
    steps.step()
    deliveries = steps.left()
    assert deliveries[-3:-1] == [[("b", (1,))], [("b", (2,)), ("b", (3,))]]
    assert [token for one in deliveries for name, ids in one if name == "a" for token in ids] == [
        *range(2, 8)
    ]


def test_what_left_and_what_is_held_is_what_had_left_without_an_interval(monkeypatch):
    """So a request that is cut off is charged the same; held tokens leave once."""
    left: list[list[str]] = []

    class NotingQueue(SimpleQueue):
        def __init__(self):
            left.append([])
            self.names = left[-1]

        def put(self, item, block=True, timeout=None):
            self.names.extend(one.state.request.request_id for one in item or ())
            super().put(item)

    monkeypatch.setattr(joining, "SimpleQueue", NotingQueue)
    apart, together = Steps(interval_s=0.0), Steps(interval_s=0.035)
    num_held = 0
    for number in range(60):
        for steps in (apart, together):
            if number in (0, 3, 20):
                steps.start(f"r{number}")
            steps.step_s = 0.03 if number % 11 == 10 else 0.004
            steps.step(is_decode=number % 17 != 16, ends="r3" if number == 40 else "")
            steps.queue.begin_step(True)
        if number == 1:
            together.delivered()  # the reader is there
        for name in ("r0", "r3", "r20"):
            had_left, has_left = (names.count(name) for names in left)
            assert has_left + together.queue.num_held(name) == had_left
            num_held += together.queue.num_held(name)
    assert num_held > 50
    assert together.queue.num_held("nobody") == 0


def test_an_error_leaves_at_once_and_the_tokens_before_it_leave_before_it(steps):
    steps.step_s = 0.001
    steps.step()
    steps.step()
    steps.step(ends="a", error=GenerationFailed("out of luck"))
    steps.step()
    deliveries = steps.left()
    assert deliveries[-2:] == [[("a", (2,)), ("a", (3,)), ("a", (4,))], [("a", ())]]


def test_tokens_of_requests_with_stop_strings_are_not_held(steps):
    steps.start("s", stop=("X",))
    for _ in range(10):
        steps.step()
    deliveries = steps.left()
    of_s = [[ids for name, ids in one if name == "s"] for one in deliveries]
    assert [ids for one in of_s for ids in one] == [(n,) for n in range(1, 11)]
    assert max(map(len, of_s)) == 1
    assert max(sum(name == "a" for name, _ in one) for one in deliveries) == 3


def test_nothing_is_held_through_a_step_with_a_prompt(steps):
    steps.step()
    steps.queue.begin_step(False)
    assert steps.delivered() == {"a": [2, 3]}


def test_nothing_is_held_once_a_step_had_nothing_to_compute(steps):
    """It waited for a load, say, and the next may do so too."""
    steps.step()
    steps.queue.end_step([])
    assert steps.delivered() == {"a": [2, 3]}


def test_a_held_token_leaves_in_time_though_the_step_does_not_end(steps):
    """The step loop is away, so the reader fetches it."""
    steps.step_s = 0.001
    for _ in range(4):
        steps.step()
    steps.queue.begin_step(True)  # and computes for ever
    assert steps.delivered() == {"a": [2, 3, 4, 5, 6]}


def test_every_token_leaves_however_long_the_steps_take(steps):
    """The queue's clock says that steps are quick; each lasts until the reader has what came before it."""
    steps.step_s = 0.001
    arrived: SimpleQueue[int] = SimpleQueue()

    def read() -> None:
        while (news := steps.queue.get()) is not None:
            for one in news:
                arrived.put(one.token_ids[0])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for token in range(2, 8):
            steps.queue.begin_step(True)
            assert arrived.get(timeout=30) == token
            steps.step()
    finally:
        steps.queue.close()
        reader.join()


def test_news_between_steps_leave_behind_all_before_them(steps):
    for _ in range(3):
        steps.step()
    state = steps.sequences["a"].state
    steps.queue.put([SequenceNews(state, 0, finish_reason=FinishReason.ABORT)])
    deliveries = steps.left()
    assert [ids for one in deliveries for _, ids in one] == [(2,), (3,), (4,), (5,), ()]
