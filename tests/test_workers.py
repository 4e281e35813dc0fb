"""Threads shared by tenants: turns by time, a bounded queue, a clock that starts with the work."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from stemma.budgets import Budget, Holding
from stemma.errors import Overloaded, RateLimited
from stemma.fair_queue import FairQueue
from stemma.supervision import LoggingSupervisor
from stemma.workers import WorkerThreads


def test_who_used_least_time_is_next() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.put("ada", f"a{number}")
    assert queue.get() == "a0"
    queue.charge("ada", 10.0)
    for number in range(3):
        queue.put("bob", f"b{number}")
    taken = []
    for _ in range(5):
        item = queue.get()
        assert item is not None
        queue.charge({"a": "ada", "b": "bob"}[item[0]], 1.0)
        taken.append(item)
    assert taken == ["b0", "b1", "b2", "a1", "a2"]


def test_nobody_saves_up_turns_and_an_empty_queue_does_not_forgive() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("ada", "a")
    assert queue.get() == "a"
    queue.charge("ada", 100.0)
    queue.put("bob", "b")
    queue.put("ada", "a")
    assert queue.get() == "b"
    queue.charge("bob", 1.0)
    queue.put("bob", "b")
    assert [queue.get(), queue.get()] == ["b", "a"]


def test_a_budget_bounds_all_and_each() -> None:
    budget = Budget("things", "things", 10, share=6)
    budget.take(6, "ada")
    with pytest.raises(RateLimited):
        budget.take(1, "ada")
    with pytest.raises(Overloaded):
        budget.take(5, "bob")
    budget.take(4, "bob")
    budget.give_back(6, "ada")
    held = Holding()
    held.take(budget, 6)
    state = budget.state()
    assert (state.held, state.num_refused, state.num_refused_shares) == (10, 1, 1)
    held.close()
    held.close()
    assert (budget.held(), budget.held("bob"), budget.held("ada")) == (4, 4, 0)


async def test_one_tenants_work_does_not_hold_up_anothers() -> None:
    """Forty jobs of one wait; one of another comes next, and its time limit counts from then."""
    budget = Budget("queue", "jobs", 100, share=40)
    workers = WorkerThreads(1, "test-fair", LoggingSupervisor(), budget)
    begun = threading.Event()

    def slow() -> float:
        begun.set()
        time.sleep(0.02)
        return time.monotonic()

    flood = [
        asyncio.create_task(workers.run(slow, limit_s=1, what="flooding", owner="ada")) for _ in range(40)
    ]
    while not begun.is_set():
        await asyncio.sleep(0.001)
    flood.append(asyncio.create_task(workers.run(slow, limit_s=1, what="flooding", owner="ada")))
    await asyncio.sleep(0)
    with pytest.raises(RateLimited) as refused:
        await workers.run(slow, limit_s=1, what="flooding", owner="ada")
    assert refused.value.retry_after_s >= 1
    done = await workers.run(time.monotonic, limit_s=0.015, what="asking", owner="bob")
    assert sum(one < done for one in await asyncio.gather(*flood)) <= 2
    assert budget.held() == 0
    workers.close()
