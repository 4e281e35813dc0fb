"""A supervisor that remembers what it was told."""

from __future__ import annotations

import threading

from stemma.supervision import Supervisor


class RecordingSupervisor(Supervisor):
    def __init__(self) -> None:
        self.failures: list[tuple[str, BaseException]] = []
        self._changed = threading.Condition()

    def on_thread_failure(self, name: str, error: BaseException) -> None:
        with self._changed:
            self.failures.append((name, error))
            self._changed.notify_all()

    def wait(self, num_failures: int, timeout_s: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.failures) >= num_failures, timeout_s)
