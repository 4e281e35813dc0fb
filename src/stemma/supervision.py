"""Threads report the errors that they don't expect, instead of dying in silence.

Every long-lived thread is started with `start_thread` and gets the `Supervisor` of its process. The engine
has the one that fails requests, turns `/health` to 503 and ends the process; tools and tests may use
`LoggingSupervisor`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override

logger = logging.getLogger(__name__)


class Supervisor(Protocol):
    """Learns of every error that no thread of ours handles."""

    def on_thread_failure(self, name: str, error: BaseException) -> None:
        """A thread met an error of an unexpected type. `name` is the thread's.

        Called on that thread, perhaps with locks held: returns at once, calls nothing back, never raises. The
        thread may go on, so this may be called again.
        """


class LoggingSupervisor(Supervisor):
    """Logs the traceback and does nothing else."""

    @override
    def on_thread_failure(self, name: str, error: BaseException) -> None:
        logger.error("thread %s failed: %r", name, error, exc_info=error)


def start_thread(
    name: str, run: Callable[[], None], supervisor: Supervisor, *, daemon: bool = True
) -> threading.Thread:
    """Start a thread; an exception that leaves `run` is reported, whatever its type."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - reported, and SystemExit ends a thread as well
            supervisor.on_thread_failure(name, error)

    thread = threading.Thread(target=guarded, name=name, daemon=daemon)
    thread.start()
    return thread
