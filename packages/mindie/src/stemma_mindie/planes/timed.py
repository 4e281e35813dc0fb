"""A run of one sequence under its client's own time limit, with the times of its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from stemma.engine.api import CacheReport, RequestOutput
from stemma.errors import GenerationFailed
from stemma.server.observe.collected import CollectedSequence
from stemma.server.transport.incoming import unless_disconnected
from stemma.server.turn.build import Turn
from stemma.server.turn.outputs import OutputStream
from stemma.server.turn.run import TurnRunner, until


@dataclass(slots=True)
class Times:
    """Milliseconds from arrival to the first output, and between steps' results."""

    began: float = field(default_factory=time.monotonic)
    prefill_ms: float | None = None
    decode_ms: list[float] = field(default_factory=list)
    _last: float = 0.0

    def seen(self, num_steps: int = 1) -> None:
        """Note an output with the results of `num_steps`, which share the time since the one before."""
        now = time.monotonic()
        if self.prefill_ms is None:
            self.prefill_ms = round(1000 * (now - self.began), 3)
        else:
            gap_ms = round(1000 * (now - self._last) / num_steps, 3)
            self.decode_ms.extend([gap_ms] * num_steps)
        self._last = now

    def latest(self) -> dict[str, Any]:
        """Return the time that the last output took, as MindIE's streams tell it."""
        is_first = not self.decode_ms
        return {
            "prefill_time": self.prefill_ms if is_first else None,
            "decode_time": None if is_first else self.decode_ms[-1],
        }

    @property
    def mean_decode_ms(self) -> float | None:
        """Mean gap between results."""
        return round(sum(self.decode_ms) / len(self.decode_ms), 3) if self.decode_ms else None


@dataclass(slots=True)
class TimedRun:
    """One request that the engine has taken."""

    outputs: OutputStream
    times: Times
    deadline: float | None
    """On the event loop's clock."""

    async def each(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs. Raises GenerationFailed once the time limit is over."""
        async for _, output in until(self.deadline, self.outputs, _too_late()):
            self.times.seen(max(1, len(output.deltas)))
            yield output


@dataclass(frozen=True, slots=True)
class TimedResult:
    """One whole sequence."""

    sequence: CollectedSequence
    cache: CacheReport
    queue_wait_s: float
    times: Times


async def start_timed(runner: TurnRunner, request: Request, turn: Turn, timeout_s: float | None) -> TimedRun:
    """Run `turn`, one sequence, and return once the engine has taken it.

    Raises GenerationFailed if that takes longer than `timeout_s`.
    """
    times = Times()
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout_at(deadline):
            outputs = await runner.start(request, [turn])
    except TimeoutError as error:
        raise _too_late() from error
    return TimedRun(outputs, times, deadline)


async def run_timed(runner: TurnRunner, request: Request, turn: Turn, timeout_s: float | None) -> TimedResult:
    """Run `turn` to its end; abort it if the client leaves or the time limit is over."""
    run = await start_timed(runner, request, turn, timeout_s)
    try:
        return await unless_disconnected(request, _to_end(run))
    finally:
        await run.outputs.aclose()


async def _to_end(run: TimedRun) -> TimedResult:
    async with aclosing(run.each()) as outputs:
        async for _ in outputs:
            pass
    [answer] = run.outputs.answers
    return TimedResult(answer.sequences[0], answer.cache, answer.queue_wait_s, run.times)


def _too_late() -> GenerationFailed:
    return GenerationFailed("the request took longer than its own timeout")
