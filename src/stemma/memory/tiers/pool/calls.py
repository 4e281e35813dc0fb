"""Backend calls in their own threads, so that a caller can stop waiting.

A call that nobody waits for any more continues in its thread until the backend answers (Mooncake: 4.3 s with
its master down). Its buffers must stay untouched until then; `Call.when_over` reports that moment.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any, Generic, TypeVar

from stemma.errors import StorageError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Call(Generic[T]):
    """One backend call: waiting, running or ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = False
        self._over = threading.Event()
        self._after: list[Callable[[], None]] = []
        self.value: T | None = None
        """What the backend returned, once the call has ended without an error."""
        self.error: BaseException | None = None
        """What the backend raised, whatever it was."""

    def run(self, function: Callable[..., T], *arguments: Any) -> None:
        """Make the call, unless it was dropped."""
        if not self._begin():
            return
        try:
            self.value = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the call gets it
            self.error = error
        finally:
            self._end()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` (None: without limit); return whether the call has ended."""
        return self._over.wait(timeout_s)

    def drop(self) -> None:
        """Drop the call if it hasn't begun; a running one continues."""
        if self._begin():
            self._end()

    def when_over(self, then: Callable[[], None]) -> None:
        """Run `then` (short, never failing) when the call has ended and its buffers are free; maybe now."""
        with self._lock:
            if not self._over.is_set():
                self._after.append(then)
                return
        then()

    def _begin(self) -> bool:
        with self._lock:
            if self._begun:
                return False
            self._begun = True
            return True

    def _end(self) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
        for then in self._after:
            try:
                then()
            except Exception:
                logger.exception("what follows a pool's call failed")


class Calls:
    """A fixed number of daemon threads that make backend calls."""

    def __init__(self, num_threads: int) -> None:
        # ThreadPool, not ThreadPoolExecutor: its threads are daemons, so a backend that never answers
        # doesn't keep the process alive.
        self._threads = ThreadPool(num_threads)

    def start(self, function: Callable[..., T], *arguments: Any) -> Call[T]:
        """Queue ``function(*arguments)``. Raises StorageError after `close`."""
        call: Call[T] = Call()
        try:
            self._threads.apply_async(call.run, (function, *arguments))
        except ValueError as error:  # closed by another thread, just now
            raise StorageError("the pool is closed") from error
        return call

    def close(self) -> None:
        """Refuse further calls; running ones continue."""
        self._threads.close()
