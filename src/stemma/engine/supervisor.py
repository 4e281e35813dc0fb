"""The supervisor of an engine's threads: the first unexpected error is kept, logged and ends the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from typing_extensions import override

from stemma.supervision import Supervisor, start_thread

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ThreadFailure:
    """An error that no thread of ours handled."""

    thread: str
    error: BaseException

    @property
    def reason(self) -> str:
        """One line for operators and clients."""
        return f"thread {self.thread} failed: {type(self.error).__name__}: {self.error}"


class EngineSupervisor(Supervisor):
    """A `supervision.Supervisor` that keeps the first error. Methods may be called from any thread.

    `on_failure` is called once, on a thread of its own, after `failure` was set.
    """

    def __init__(self, on_failure: Callable[[ThreadFailure], None] | None = None) -> None:
        self._failure: ThreadFailure | None = None
        self._lock = threading.Lock()
        self._reports: SimpleQueue[ThreadFailure | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._watcher: threading.Thread | None = None
        if on_failure is not None:
            self._watcher = start_thread("stemma-supervisor", partial(self._watch, on_failure), self)

    @property
    def failure(self) -> ThreadFailure | None:
        """The first failure; None while there is none."""
        return self._failure

    @override
    def on_thread_failure(self, name: str, error: BaseException) -> None:
        logger.critical("thread %s failed; the engine stops: %r", name, error, exc_info=error)
        failure = ThreadFailure(name, error)
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
        self._reports.put(failure)

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Run a function on a new daemon thread that `close` waits for."""
        self._threads.append(start_thread(name, run, self))

    def close(self) -> None:
        """Wait until the threads started here have ended."""
        for thread in self._threads:
            thread.join()
        self._reports.put(None)
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self, on_failure: Callable[[ThreadFailure], None]) -> None:
        failure = self._reports.get()
        if failure is not None:
            on_failure(failure)
