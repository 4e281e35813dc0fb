"""Backend calls in their own threads, so that a caller can stop waiting.

A call that nobody waits for any more continues in its thread until the backend answers (Mooncake: 4.3 s with
its master down). Its buffers must stay untouched until then: until its future is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

from stemma.errors import StorageError
from stemma.supervision import LoggingSupervisor, start_thread

T = TypeVar("T")


class Calls:
    """A fixed number of daemon threads that make backend calls."""

    def __init__(self, num_threads: int) -> None:
        # ThreadPool, not ThreadPoolExecutor: its threads are daemons, so a backend that never answers
        # doesn't keep the process alive.
        self._threads = ThreadPool(num_threads)
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()

    def start(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queue ``function(*arguments)``; one that hasn't begun can be cancelled.

        Raises StorageError after `close`.
        """
        call: Future[T] = Future()
        with self._lock:
            self._pending.add(call)
        call.add_done_callback(self._ended)
        try:
            self._threads.apply_async(_make, (call, function, arguments))
        except ValueError as error:  # closed by another thread, just now
            call.cancel()
            raise StorageError("the pool is closed") from error
        return call

    def close(self, last: Callable[[], object]) -> Future[object]:
        """Refuse further calls and cancel those that haven't begun; call `last` once the others have ended.

        A client whose connection is closed under a running call may crash the process (Mooncake's does).
        """
        self._threads.close()
        with self._lock:
            pending = list(self._pending)
        running = [call for call in pending if not call.cancel()]
        closing: Future[object] = Future()

        def close() -> None:
            wait(running)
            _make(closing, last, ())

        start_thread("stemma-pool-close", close, LoggingSupervisor())
        return closing

    def _ended(self, call: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(call)


def _make(call: Future[T], function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    if not call.set_running_or_notify_cancel():
        return
    try:
        value = function(*arguments)
    except BaseException as error:  # noqa: BLE001 - whoever waits for the call gets it
        call.set_exception(error)
    else:
        call.set_result(value)
