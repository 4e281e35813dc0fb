"""Threads for work that must not stop the event loop: tokenizing, rendering, parsing, compiling grammars.

A Python thread can't be ended from outside. So these are daemon threads, which don't hold the end of the
process, and work has a time limit: whoever waits gets an error, another thread takes the place of the stuck
one, and that one ends when it comes back. An error of the work is raised where it was asked for. An error of
the thread itself is reported to the engine's supervisor, like that of any other thread.

Owners (tenants) share the threads by the time that their work takes, and what waits is a budget. A time limit
begins when the work does.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from stemma.budgets import Budget
from stemma.errors import EngineFailed, Overloaded, TookTooLong
from stemma.fair_queue import FairQueue
from stemma.supervision import Supervisor, start_thread

T = TypeVar("T")
MAX_STUCK = 8
"""Threads beyond their time limit; with more than that, new work is refused."""


class _Job:
    def __init__(
        self, work: Callable[[], Any], limit_s: float, what: str, owner: str, budget: Budget | None
    ) -> None:
        self.work = work
        self.owner = owner
        self.budget = budget
        self.what = what
        self.limit_s = limit_s
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, on_late: Callable[[], None]) -> None:
        """Start the clock: waiting for a thread doesn't count."""
        if not self.future.done():
            self._timer = self.loop.call_later(self.limit_s, self._expire, on_late)

    def finish(self, result: Any, error: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def _expire(self, on_late: Callable[[], None]) -> None:
        on_late()
        if not self.future.done():
            self.future.set_exception(TookTooLong(f"{self.what} took more than {self.limit_s:g} s"))


class WorkerThreads:
    """A few daemon threads; `run` is for one event loop at a time. They start with the first work."""

    def __init__(
        self, num_threads: int, name: str, supervisor: Supervisor, budget: Budget | None = None
    ) -> None:
        """`budget`: of what waits for a thread; None: no bound."""
        self._name = name
        self._supervisor = supervisor
        self.budget = budget
        self.seconds = 0.0
        """Time that all work took."""
        self._num_done = 0
        self._jobs: FairQueue[_Job] = FairQueue()
        self._lock = threading.Lock()
        self._stuck: set[threading.Thread] = set()
        self._num_threads = num_threads
        self._has_started = False

    async def run(
        self,
        work: Callable[[], T],
        *,
        limit_s: float,
        what: str,
        owner: str = "",
        is_bounded: bool = True,
    ) -> T:
        """Return what `work` returns. Raises TookTooLong if it takes more than `limit_s`.

        Raises Overloaded or RateLimited if too much waits already, of all or of `owner`. Work that isn't
        bounded, since it ends what was admitted before, is never refused for that.
        """
        budget = self.budget if is_bounded else None
        if len(self._stuck) >= MAX_STUCK:
            raise Overloaded(f"too much {what} hangs; try again later")
        if budget is not None:
            budget.take(1, owner, retry_after_s=self._wait_s())
        job = _Job(work, limit_s, what, owner, budget)
        self._jobs.put(owner, job)
        if not self._has_started:
            self._has_started = True
            for _ in range(self._num_threads):
                self._start_thread()
        result: T = await job.future
        return result

    def close(self) -> None:
        """Let the threads end after what they do now."""
        for _ in range(self._num_threads):
            self._jobs.end()

    def _wait_s(self) -> float:
        """Return how long what waits now will take, by what work took so far."""
        each_s = self.seconds / max(1, self._num_done)
        return math.ceil(len(self._jobs) * each_s / self._num_threads) or 1.0

    def _start_thread(self) -> None:
        start_thread(self._name, self._serve, self._supervisor)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                goes_on = self._perform(job)
            except BaseException:
                # Others still wait while the server drains: another thread serves them.
                _post(job.loop, job.finish, None, EngineFailed(f"{job.what} failed: its thread died"))
                self._start_thread()
                raise
            if not goes_on:
                return
            del job

    def _perform(self, job: _Job) -> bool:
        """Do a job; return whether this thread still has its place."""
        me = threading.current_thread()
        if job.budget is not None:
            job.budget.give_back(1, job.owner)
        if job.future.cancelled():
            return True
        result: Any = None
        error: BaseException | None = None
        if not _post(job.loop, job.begin, lambda: self._replace(me)):
            return True
        begun = time.perf_counter()
        try:
            result = job.work()
        except BaseException as caught:  # noqa: BLE001 - whoever waits gets it
            error = caught
        self._count(job.owner, time.perf_counter() - begun)
        _post(job.loop, job.finish, result, error)
        with self._lock:
            is_replaced = me in self._stuck
            self._stuck.discard(me)
        return not is_replaced

    def _count(self, owner: str, seconds: float) -> None:
        self._jobs.charge(owner, seconds)
        with self._lock:
            self.seconds += seconds
            self._num_done += 1

    def _replace(self, thread: threading.Thread) -> None:
        with self._lock:
            self._stuck.add(thread)
        self._start_thread()


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> bool:
    """Run `call` on the loop; return False if the loop has ended."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return False
    return True
