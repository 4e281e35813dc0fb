"""Steps that are launched before the host knows what the step before them drew.

Scheduling, writing down a batch and queuing its kernels cost the host milliseconds, in which a device that is
asked one step at a time has nothing to do. So the next step is launched while one runs. Its input ids come
from the tensor that the running one draws into; only afterwards does the host read what that was. SGLang and
TensorRT-LLM call this an overlap scheduler, vLLM and MindIE asynchronous scheduling.

What the host learns late: a sequence may turn out to be over although its next token is being computed. That
token is dropped, and the blocks stay with the sequence until the step that writes to them is over
(`PrefixCache.open_fence`). What needs the host between two steps (drafts, penalties, forking the siblings of
a prompt) runs in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from stemma.engine.core.request import Scheduled
from stemma.engine.core.runner import PreparedStep
from stemma.engine.sampling.sampler import Draw, Sampled, draw_tokens, plan_rows_ahead
from stemma.memory.cache.prefix_cache import PrefixCache

Work: TypeAlias = Callable[[], Draw | None]
"""Runs a step; None if it draws nothing."""


class Pending(Protocol):
    """Work that was queued."""

    def result(self) -> Draw | None:
        """Wait until it is over; return what it returned, or raise what it raised."""

    def ahead(self) -> Draw | None:
        """Return the same to work that is queued behind it, whose turn comes after it anyway."""


class WorkQueue(Protocol):
    """Does work in the order it comes, beside the host."""

    def submit(self, work: Work) -> Pending:
        """Queue `work`."""

    def drain(self) -> None:
        """Wait until nothing is under way, whatever became of it."""

    def close(self) -> None:
        """Wait, and let go of threads. Nothing is queued afterwards."""


class _OnThread:
    """See `Pending`."""

    def __init__(self, future: Future[Draw | None]) -> None:
        self.result = future.result
        self.ahead = future.result


class ThreadQueue:
    """Work on the CPU: a thread runs it, and torch lets the others go on meanwhile."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="stemma-model")
        self._last: Future[Draw | None] | None = None

    def submit(self, work: Work) -> Pending:
        """See `WorkQueue`."""
        self._last = self._executor.submit(work)
        return _OnThread(self._last)

    def drain(self) -> None:
        """See `WorkQueue`."""
        if self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """See `WorkQueue`."""
        self._executor.shutdown()


class _InStream:
    """See `Pending`."""

    def __init__(self, draw: Draw | None, stream: torch.cuda.Stream) -> None:
        self._draw = draw
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def result(self) -> Draw | None:
        self._event.synchronize()
        return self._draw

    def ahead(self) -> Draw | None:
        return self._draw


class StreamQueue:
    """Work on a CUDA device: running it only queues kernels in the stream of the step loop."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def submit(self, work: Work) -> Pending:
        """See `WorkQueue`."""
        return _InStream(work(), torch.cuda.current_stream(self._device))

    def drain(self) -> None:
        """See `WorkQueue`."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """See `WorkQueue`."""
        self.drain()


class StepRunner(Protocol):
    """The part of `runner.Runner` that steps ahead need."""

    def prepare(self, plan: Sequence[Scheduled]) -> PreparedStep:
        """Write down a step."""

    def run(self, step: PreparedStep, drawn: torch.Tensor | None) -> torch.Tensor:
        """Return its logits."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and isn't collected yet."""

    plan: Sequence[Scheduled]
    launched_s: float
    pending: Pending


def can_fly(plan: Sequence[Scheduled], *, has_drafter: bool) -> bool:
    """Return whether neither this step nor the next needs the host to know the tokens that this one draws."""
    for item in plan:
        if not item.num_logits:
            continue
        state = item.sequence.state
        if has_drafter or item.sequence.sampling.needs_host:
            return False
        if len(state.sequences) < state.request.params.n:
            return False
    return True


class StepsAhead:
    """Launches steps and waits for them, first come first served; at most two are under way at a time."""

    def __init__(self, queue: WorkQueue, cache: PrefixCache, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._cache = cache
        self._clock = clock
        self._landed_s = 0.0
        self.flight: Flight | None = None
        """The step launched last, if nobody waited for it yet."""

    def launch(self, runner: StepRunner, plan: Sequence[Scheduled]) -> None:
        """Launch a plan that can fly, behind the step in flight if there is one.

        If it raises, nothing is under way any more, and `flight` is None.
        """
        behind, self.flight = self.flight, None
        drawing = [item for item in plan if item.num_logits]
        for row, item in enumerate(drawing):
            item.row = row
        now_s = self._clock()
        try:
            step = runner.prepare(plan)
            rows = plan_rows_ahead(
                [item.sequence.sampling for item in drawing],
                [0 if item.source_row is None else 1 for item in drawing],
            )

            @torch.inference_mode()
            def work() -> Draw | None:
                before = behind.pending.ahead() if behind is not None else None
                logits = runner.run(step, before.token_ids if before is not None else None)
                return draw_tokens(logits, rows) if drawing else None

            pending = self._queue.submit(work)
        except Exception:
            self._queue.drain()
            raise
        self._cache.open_fence()
        for item in plan:
            item.sequence.in_flight = item
        self.flight = Flight(plan, now_s, pending)

    def land(self, flight: Flight) -> tuple[Sampled, float]:
        """Wait for the oldest step; return a token for each item that wants logits, and seconds it took.

        Raises what the step raised; nothing is under way then, as after `ground`.
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
        """Let all that is under way end, and forget what it was. Its sequences are as they were before."""
        flight, self.flight = self.flight, None
        self._queue.drain()
        while self._cache.has_fence:
            self._cache.close_fence()
        for item in flight.plan if flight is not None else ():
            item.sequence.in_flight = None

    def close(self) -> None:
        """End what is under way, and let go of threads."""
        self.ground()
        self._queue.close()
