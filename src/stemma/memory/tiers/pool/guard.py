"""Guarded backend calls: off the caller's thread, with a deadline, behind a circuit breaker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stemma.errors import StorageError
from stemma.memory.tiers.block_store import PutResult, ReadResult, StoreCounters
from stemma.memory.tiers.pool.backend import PoolBackend
from stemma.memory.tiers.pool.breaker import CircuitBreaker
from stemma.memory.tiers.pool.calls import Calls

T = TypeVar("T")
R = TypeVar("R")
_log = logging.getLogger(__name__)

PROBE_KEY = "probe"
"""Key that a probe asks for; nobody ever puts it."""


@dataclass(frozen=True, slots=True)
class GuardedResult(Generic[T]):
    """Result of a guarded call."""

    value: T | None
    """None if the call failed."""
    late: bool = False
    """Whether it failed because it exceeded its deadline."""


class Guard:
    """Makes calls to one backend and counts why they fail. Thread-safe."""

    def __init__(
        self,
        backend: PoolBackend,
        *,
        deadline_s: float,
        num_threads: int,
        breaker: CircuitBreaker,
    ) -> None:
        self.backend = backend
        self.deadline_s = deadline_s
        self.breaker = breaker
        self.counters = StoreCounters()
        self.last_error: str | None = None
        """Message of the last whole-call failure."""
        self._calls = Calls(num_threads)
        self._lock = threading.Lock()

    def admits(self) -> bool:
        """Return whether calls go through now; if not, send a probe when one is due."""
        if self.breaker.allows:
            return True
        if self.breaker.begin_probe():
            self._probe()
        return False

    def start(
        self, function: Callable[..., list[R]], names: Sequence[str], *arguments: Any
    ) -> Future[list[R]]:
        """Start a call that returns one result per name."""
        return self._calls.start(_one_per_name, function, names, *arguments)

    def finish(self, call: Future[T], num_blocks: int, *, settle: bool = False) -> GuardedResult[T]:
        """Wait for a call on `num_blocks` blocks; report its result to the breaker and count failures.

        With `settle`, don't return before the backend has finished with the call's buffers, however late.
        Raises StorageError if the guard was closed before the call began.
        """
        try:
            error = call.exception(self.deadline_s)
        except TimeoutError:
            self.breaker.timed_out()
            self.count_reason("late", num_blocks)
            self._note(f"no answer within {self.deadline_s:g} s")
            if not call.cancel() and settle:
                wait([call])
            return GuardedResult(None, late=True)
        except CancelledError as closed:
            raise StorageError("the pool is closed") from closed
        if error is not None:
            self.breaker.failed()
            self._note(str(error) or type(error).__name__)
            reason = "unreachable" if isinstance(error, StorageError) else "backend_error"
            self.count_reason(reason, num_blocks)
            return GuardedResult(None)
        self.breaker.succeeded()
        return GuardedResult(call.result())

    def remove(self, names: Sequence[str]) -> int:
        """Drop names; return how many were there, as far as is known."""
        return self.finish(self._calls.start(self.backend.remove, names), 0).value or 0

    def count_reads(self, results: Iterable[ReadResult], block_bytes: int) -> None:
        """Count the results of reads."""
        with self._lock:
            for result in results:
                self.counters.reads[result] += 1
                if result is ReadResult.HIT:
                    self.counters.read_bytes += block_bytes

    def count_puts(self, results: Iterable[PutResult], block_bytes: int) -> None:
        """Count the results of puts."""
        with self._lock:
            for result in results:
                self.counters.puts[result] += 1
                if result is PutResult.STORED:
                    self.counters.written_bytes += block_bytes

    def count_reason(self, reason: str, number: int = 1) -> None:
        """Count blocks that failed for `reason`."""
        if number:
            with self._lock:
                self.counters.reasons[reason] += number

    def close(self) -> None:
        """Refuse further calls, close the backend behind those that run; wait no longer than the deadline."""
        wait([self._calls.close(self.backend.close)], self.deadline_s)

    def _note(self, problem: str) -> None:
        if problem != self.last_error:
            _log.warning("pool: %s", problem)
        self.last_error = problem

    def _probe(self) -> None:
        def judge(call: Future[list[bool]]) -> None:
            success = not call.cancelled() and call.exception() is None
            self.breaker.end_probe(success)
            if success:
                _log.warning("pool: answers again")

        self._calls.start(self.backend.exists_many, [PROBE_KEY]).add_done_callback(judge)


def _one_per_name(function: Callable[..., list[R]], names: Sequence[str], *arguments: Any) -> list[R]:
    results = function(names, *arguments)
    if len(results) != len(names):
        raise StorageError(f"the pool's backend gave {len(results)} results for {len(names)} keys")
    return results
