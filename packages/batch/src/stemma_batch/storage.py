"""The store of batches as the event loop uses it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from stemma.engine.client import EngineClient
from stemma.errors import StorageError
from stemma.workers import WorkerThreads
from stemma_batch.store import BatchStore

T = TypeVar("T")
_LIMIT_S = 600.0


class BatchStorage:
    """The store, used from the event loop: its calls run on one thread, one after the other."""

    def __init__(self, store: BatchStore, engine: EngineClient) -> None:
        self.store = store
        self._threads = WorkerThreads(1, "stemma-batches", engine.supervisor)

    async def call(self, work: Callable[[BatchStore], T], owner: str = "") -> T:
        """Return what `work` does with the store. Owners take turns by the time that theirs took.

        Raises StorageError if the disk or SQLite fails.
        """
        try:
            return await self._threads.run(
                lambda: work(self.store), limit_s=_LIMIT_S, what="storing batches", owner=owner
            )
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"batches can't be stored: {error}") from error

    def close(self) -> None:
        """End the thread and free the directory."""
        self._threads.close()
        self.store.close()
