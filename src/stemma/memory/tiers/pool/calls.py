"""Backend calls in their own threads, so that a caller can stop waiting.

A call that nobody waits for any more continues in its thread until the backend answers (Mooncake: 4.3 s with
its master down). Its buffers must stay untouched until then: until its future is done.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

from stemma.errors import StorageError

T = TypeVar("T")


class Calls:
    """A fixed number of daemon threads that make backend calls."""

    def __init__(self, num_threads: int) -> None:
        # ThreadPool, not ThreadPoolExecutor: its threads are daemons, so a backend that never answers
        # doesn't keep the process alive.
        self._threads = ThreadPool(num_threads)

    def start(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queue ``function(*arguments)``; one that hasn't begun can be cancelled.

        Raises StorageError after `close`.
        """
        call: Future[T] = Future()
        try:
            self._threads.apply_async(_make, (call, function, arguments))
        except ValueError as error:  # closed by another thread, just now
            raise StorageError("the pool is closed") from error
        return call

    def close(self) -> None:
        """Refuse further calls; running ones continue."""
        self._threads.close()


def _make(call: Future[T], function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    if not call.set_running_or_notify_cancel():
        return
    try:
        value = function(*arguments)
    except BaseException as error:  # noqa: BLE001 - whoever waits for the call gets it
        call.set_exception(error)
    else:
        call.set_result(value)
