"""A run of one sequence under its client's own time limit, with the times of its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from stemma.engine.api import CacheReport, GenerationRequest, RequestOutput
from stemma.errors import GenerationFailed
from stemma.server.generation import CollectedSequence, OutputStream, RequestRunner, until
from stemma.server.transport.disconnect import unless_disconnected


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
    """One request whose first output has arrived."""

    outputs: OutputStream
    times: Times
    deadline: float | None
    """On the event loop's clock."""

    @property
    def cache(self) -> CacheReport:
        """A report of what was reused."""
        return self.outputs.first[1].cache

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


async def start_timed(
    runner: RequestRunner, request: Request, generation: GenerationRequest, timeout_s: float | None
) -> TimedRun:
    """Run `generation`, one sequence, and return once its first output is there.

    Raises GenerationFailed if that takes longer than `timeout_s`.
    """
    times = Times()
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    api = generation.request_id.partition("-")[0]
    try:
        async with asyncio.timeout_at(deadline):
            outputs = await runner.start(request, [generation], api)
    except TimeoutError as error:
        raise _too_late() from error
    return TimedRun(outputs, times, deadline)


async def run_timed(
    runner: RequestRunner, request: Request, generation: GenerationRequest, timeout_s: float | None
) -> TimedResult:
    """Run `generation` to its end; abort it if the client leaves or the time limit is over."""
    run = await start_timed(runner, request, generation, timeout_s)
    try:
        return await unless_disconnected(request, _to_end(run))
    finally:
        await run.outputs.aclose()


async def _to_end(run: TimedRun) -> TimedResult:
    sequence = CollectedSequence()
    texts: list[str] = []
    queue_wait_s = 0.0
    async with aclosing(run.each()) as outputs:
        async for output in outputs:
            queue_wait_s = output.queue_wait_s
            for delta in output.deltas:
                texts.append(delta.text)
                sequence.token_ids.extend(delta.token_ids)
                if delta.finish_reason is not None:
                    sequence.finish_reason = delta.finish_reason
                    sequence.stop_reason = delta.stop_reason
    sequence.text = "".join(texts)
    return TimedResult(sequence, run.cache, queue_wait_s, run.times)


def _too_late() -> GenerationFailed:
    return GenerationFailed("the request took longer than its own timeout")
