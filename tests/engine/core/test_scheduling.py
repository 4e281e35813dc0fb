"""What goes into each step, and in which order requests start."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.harness import greedy, prompt

from stemma.engine.core import ordering, scheduler
from stemma.engine.core.ordering import order_fcfs, order_longest_prefix


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_decodes_come_before_prefill_chunks_within_the_budget(harness):
    engine = harness(num_blocks=64, block_size=8, max_batch_tokens=20)
    engine.add(prompt(1, 10), greedy(10), request_id="short")
    engine.step()
    engine.add(prompt(2, 50), greedy(2), request_id="long")
    for _ in range(4):
        engine.step()
    assert engine.runner.plans == [
        [("short", 0, 10)],
        [("short", 10, 1), ("long", 0, 19)],
        [("short", 11, 1), ("long", 19, 19)],
        [("short", 12, 1), ("long", 38, 12)],
        [("short", 13, 1), ("long", 50, 1)],
    ]


def test_a_budget_of_one_token_still_serves(harness):
    engine = harness(num_blocks=16, block_size=8, max_batch_tokens=1)
    ids = [engine.add(prompt(i, 5), greedy(3)) for i in range(2)]
    engine.run()
    assert all(len(engine.answers[i].token_ids[0]) == 3 for i in ids)


def test_no_more_run_than_seats(harness):
    engine = harness(num_blocks=64, block_size=8, max_num_seqs=2)
    for i in range(5):
        engine.add(prompt(i, 4), greedy(5))
    while engine.engine.has_work:
        engine.step()
        assert engine.engine.stats().num_running <= 2


def test_the_youngest_yields(harness):
    engine = harness(num_blocks=6, block_size=4, order="fcfs")
    for name in ("old", "young"):
        engine.add(prompt(len(name), 10), greedy(12), request_id=name)
    order = []
    while engine.engine.has_work:
        engine.step()
        order += [n for n, a in engine.answers.items() if a.finished and n not in order]
    assert engine.engine.stats().num_preemptions > 0
    assert order == ["old", "young"]


def start_order(engine) -> list[str]:
    seen: list[str] = []
    for plan in engine.runner.plans:
        seen += [name for name, _, _ in plan if name not in seen]
    return seen


@pytest.mark.parametrize(("order", "expected"), [("fcfs", ["b", "a"]), ("longest-prefix", ["a", "b"])])
def test_order_of_admission(harness, order, expected):
    engine = harness(num_blocks=64, block_size=8, max_num_seqs=1, order=order)
    shared = prompt(1, 30)
    engine.serve(shared, greedy(1))
    engine.runner.plans.clear()
    engine.add(prompt(2, 20), greedy(1), request_id="b")
    engine.add(np.concatenate([shared, prompt(3, 5)]), greedy(1), request_id="a")
    engine.run()
    assert start_order(engine) == expected


def test_nobody_starves_behind_longer_prefixes(harness):
    """A prompt that shares nothing is overtaken by the ten hits of the next 5 s, and by no others."""
    clock = ManualClock()
    engine = harness(num_blocks=64, block_size=8, max_num_seqs=1, clock=clock, ageing_s=5.0)
    shared = prompt(1, 30)
    engine.serve(shared, greedy(1))
    engine.add(prompt(2, 20), greedy(1), request_id="lonely")
    for second in range(20):
        clock.now = float(second)
        for i in range(2):
            tail = prompt(1000 + 2 * second + i, 5)
            engine.add(np.concatenate([shared, tail]), greedy(1), request_id=f"hit-{second}-{i}")
        engine.step()
        if engine.answers["lonely"].finished:
            break
    assert clock.now == 10.0
    engine.run()


class _Waiting:
    def __init__(self, order: int, arrival: float, cached: int, was_preempted: bool = False) -> None:
        self.age = (order, 0)
        self.state = self
        self.arrival, self.cached, self.was_preempted = arrival, cached, was_preempted


def test_order_of_a_queue():
    queue = [
        _Waiting(0, 9.0, 10),
        _Waiting(1, 9.0, 90),
        _Waiting(2, 9.0, 90),
        _Waiting(3, 1.0, 0),
        _Waiting(4, 9.0, 0, was_preempted=True),
    ]
    ordered = order_longest_prefix(queue, lambda s: s.cached, ageing_s=5.0)
    assert [s.age[0] for s in ordered] == [4, 3, 1, 2, 0]
    assert [s.age[0] for s in order_fcfs(queue)] == [4, 0, 1, 2, 3]


def test_a_head_that_does_not_fit_is_not_overtaken_for_ever(harness):
    """A prompt that needs the whole cache starts as soon as the running ones are through."""
    engine = harness(num_blocks=8, block_size=8, order="fcfs")
    engine.add(prompt(1, 20), greedy(10), request_id="first")
    engine.step()
    engine.add(prompt(2, 60), greedy(2), request_id="big")
    for i in range(6):
        engine.add(prompt(10 + i, 6), greedy(2), request_id=f"small-{i}")
    engine.run()
    assert start_order(engine)[:2] == ["first", "big"]


def test_a_step_looks_at_the_oldest_alone_however_long_the_queue(harness, monkeypatch):
    lengths = []

    def order(waiting, *rest):
        lengths.append(len(list(waiting)))
        return ordering.order_waiting(waiting, *rest)

    monkeypatch.setattr(scheduler, "order_waiting", order)
    engine = harness(num_blocks=64, block_size=16, max_num_seqs=4)
    names = [engine.add(prompt(i, 5), greedy(2)) for i in range(400)]
    engine.run()
    assert all(engine.answers[name].finished for name in names)
    assert max(lengths) == ordering.MAX_MATCHED
