"""The thread on which an engine is loaded and its steps run.

OpenMP keeps a pool of threads for each thread that starts parallel work. A second pool makes libgomp count
more threads than cores, and then every barrier sleeps instead of spinning: decode at batch 8 loses a quarter
of its speed. So weights are packed and steps run on one thread, whichever thread calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
_Jobs: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class StepThread:
    """Runs functions one at a time on a daemon thread of its own, which ends with this object."""

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._interrupted = threading.Event()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="stemma-steps", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    @property
    def is_interrupted(self) -> bool:
        """Whether the caller of `call` was interrupted (Ctrl-C): long work should end early."""
        return self._interrupted.is_set()

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread; return what it returns, raise what it raises.

        An interrupt of the caller sets `is_interrupted` until the function has ended, then is raised.
        """
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()
        self._jobs.put((future, function))
        try:
            return future.result()
        except BaseException:
            if not future.done():
                self._interrupted.set()
                wait([future])
                self._interrupted.clear()
            raise

    def close(self) -> None:
        """End the thread after what is queued. A second call does nothing."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, function = job
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            future.set_exception(error)
        del job, future, function
