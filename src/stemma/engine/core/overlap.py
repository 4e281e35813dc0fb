"""Steps launched before the host knows the tokens of the previous step.

Scheduling, preparing a batch and queuing its kernels take the host milliseconds, in which a device that gets
one step at a time is idle. So the next step is launched while one runs. Its input ids come from the tensor
that the running step draws into; the host reads them later. SGLang and
TensorRT-LLM call this an overlap scheduler, vLLM and MindIE asynchronous scheduling.

The host may learn late that a sequence has ended, while its next token is being computed. That token is
dropped, and the sequence keeps its blocks until the step that writes to them has ended
(`PrefixCache.open_fence`). What needs the host between two steps (drafts, penalties, forking the siblings of
a prompt) runs in turn; steps of batches in which drafts don't pay run ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from typing_extensions import override

from stemma.engine.core.runner import PreparedStep
from stemma.engine.core.step_rows import StepRows
from stemma.engine.sampling.sampler import Draw, Sampled, Sampler, plan_rows_ahead
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.accelerator import Accelerator

Work: TypeAlias = Callable[[], Draw | None]
"""Runs a step; None if it draws nothing."""


class Pending(Protocol):
    """Work that was queued."""

    def result(self) -> Draw | None:
        """Wait until it has ended; return what it returned, or raise what it raised."""

    def ahead(self) -> Draw | None:
        """Return the same result, for work queued behind this one."""


class WorkQueue(Protocol):
    """Does work in the order it is queued, beside the host."""

    def submit(self, work: Work) -> Pending:
        """Queue `work`."""

    def drain(self) -> None:
        """Wait until all queued work has ended, in whatever way."""

    def close(self) -> None:
        """Wait, and end the threads. Nothing is queued afterwards."""


class _OnThread:
    """A `Pending` step that a thread computes."""

    def __init__(self, future: Future[Draw | None]) -> None:
        self.result = future.result
        self.ahead = future.result


class ThreadQueue(WorkQueue):
    """Work on the CPU: a thread runs it; torch releases the GIL meanwhile."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="stemma-model")
        self._last: Future[Draw | None] | None = None

    @override
    def submit(self, work: Work) -> Pending:
        self._last = self._executor.submit(work)
        return _OnThread(self._last)

    @override
    def drain(self) -> None:
        if self._last is not None:
            wait([self._last])

    @override
    def close(self) -> None:
        self._executor.shutdown()


class _InStream:
    """A `Pending` step that a stream computes."""

    def __init__(self, draw: Draw | None, event: Any) -> None:
        """`event`: behind the step."""
        self._draw = draw
        self._event = event

    def result(self) -> Draw | None:
        self._event.synchronize()
        return self._draw

    def ahead(self) -> Draw | None:
        return self._draw


class StreamQueue(WorkQueue):
    """Work on a device beside the host: running it only queues kernels in the stream of the step loop."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @override
    def submit(self, work: Work) -> Pending:
        draw = work()
        return _InStream(draw, self._accelerator.marked())

    @override
    def drain(self) -> None:
        self._accelerator.synchronize()

    @override
    def close(self) -> None:
        self.drain()


class StepRunner(Protocol):
    """The part of `runner.Runner` that steps ahead need."""

    def prepare(self, rows: StepRows) -> PreparedStep:
        """Prepare the batch of a step."""

    def run(self, step: PreparedStep, drawn: torch.Tensor | None) -> torch.Tensor:
        """Return its logits."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and isn't collected yet."""

    rows: StepRows
    launched_s: float
    pending: Pending


def can_fly(rows: StepRows, *, may_draft: bool) -> bool:
    """Return whether neither this step nor the next needs this step's tokens on the host.

    `may_draft`: drafts were asked for, which go on from them.
    """
    if rows.num_scored:
        return False
    for item in rows.items:
        state = item.sequence.state
        if state.pooled is not None:
            return False
        if not item.num_logits:
            continue
        if may_draft or item.sequence.sampling.needs_host:
            return False
        if len(state.sequences) < state.request.params.n:
            return False
    return True


class StepsAhead:
    """Launches steps and waits for them in order; at most two are in flight at a time."""

    def __init__(
        self, queue: WorkQueue, cache: PrefixCache, clock: Callable[[], float], sampler: Sampler
    ) -> None:
        self._queue, self._sampler = queue, sampler
        self._cache = cache
        self._clock = clock
        self._landed_s = 0.0
        self.flight: Flight | None = None
        """The step launched last, if nobody waited for it yet."""

    def launch(self, runner: StepRunner, rows: StepRows) -> None:
        """Launch a step that can run ahead, behind the step in flight if there is one.

        If it raises, nothing is in flight, and `flight` is None.
        """
        behind, self.flight = self.flight, None
        drawing = [item for item in rows.items if item.num_logits]
        now_s = self._clock()
        try:
            step = runner.prepare(rows)
            draws = plan_rows_ahead(
                [item.sequence.sampling for item in drawing],
                [0 if item.source_row is None else 1 for item in drawing],
            )

            @torch.inference_mode()
            def work() -> Draw | None:
                before = behind.pending.ahead() if behind is not None else None
                logits = runner.run(step, before.token_ids if before is not None else None)
                return self._sampler.draw(logits, draws) if draws else None

            pending = self._queue.submit(work)
        except Exception:
            self._queue.drain()
            raise
        self._cache.open_fence()
        for item in rows.items:
            item.sequence.in_flight = item
        self.flight = Flight(rows, now_s, pending)

    def land(self, flight: Flight) -> tuple[Sampled, float]:
        """Wait for the oldest step; return a token for each item that wants logits, and seconds it took.

        Raises what the step raised; then nothing is in flight, as after `ground`.
        """
        if self.flight is flight:
            self.flight = None
        try:
            draw = flight.pending.result()
        except Exception:
            self.ground()
            raise
        self._cache.close_fence()
        over_s = self._clock()
        seconds = over_s - max(flight.launched_s, self._landed_s)
        self._landed_s = over_s
        return Sampled([], []) if draw is None else draw.read(), seconds

    def ground(self) -> None:
        """Wait until all steps in flight have ended, and drop their results. Their sequences are as before
        the launch."""
        flight, self.flight = self.flight, None
        self._queue.drain()
        while self._cache.has_fence:
            self._cache.close_fence()
        for item in flight.rows.items if flight is not None else ():
            item.sequence.in_flight = None

    def close(self) -> None:
        """Wait for the steps in flight, and end the threads."""
        self.ground()
        self._queue.close()
