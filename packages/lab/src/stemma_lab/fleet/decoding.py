"""Decoding of a simulated server: all answers share its steps, and each further one makes a step longer."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """A step takes `step_s` with one answer, and `row_s` more for each further one."""

    step_s: float = 0.02
    row_s: float = 0.0002


class Decoding:
    """Answers that grow by a token a step, in virtual time."""

    def __init__(self, model: DecodeModel) -> None:
        self.model = model
        self.slowdown = 1.0
        """Factor on the time of a step."""
        self._num_steps = 0.0
        """Since the start, as of `_at`: steps pass as time does, faster or slower."""
        self._at = 0.0
        self._order = count()
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, num_tokens: float) -> None:
        """Return once an answer has so many tokens more."""
        self._pass()
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._ends, (self._num_steps + num_tokens, next(self._order), future))
        self._set_timer()
        try:
            await future
        finally:
            if future.cancelled():
                self._pass()
                self._ends = [one for one in self._ends if one[2] is not future]
                heapq.heapify(self._ends)
                self._set_timer()

    @property
    def _step_s(self) -> float:
        return self.slowdown * (self.model.step_s + self.model.row_s * max(0, len(self._ends) - 1))

    def _pass(self) -> None:
        """Count the steps of the time that has passed."""
        now = asyncio.get_running_loop().time()
        if self._ends:
            self._num_steps += (now - self._at) / self._step_s
        self._at = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            wait_s = max(0.0, self._ends[0][0] - self._num_steps) * self._step_s
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._end_one)

    def _end_one(self) -> None:
        self._pass()
        _, _, future = heapq.heappop(self._ends)
        if not future.done():
            future.set_result(None)
        self._set_timer()
