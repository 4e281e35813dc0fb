"""A queue for threads that takes turns between owners by the time that their work took."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Who used least time is served next; those who wait share the threads' seconds evenly. Thread-safe.

    An owner who comes back starts level with the one served last, or with the time that is still held against
    it: nobody saves up turns, and an empty queue doesn't forgive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._filled = threading.Semaphore(0)
        self._waiting: dict[str, deque[T]] = {}
        self._used: dict[str, float] = {}
        self._level = 0.0
        """Seconds of the owner served last, when it was served."""

    def put(self, owner: str, item: T) -> None:
        """Queue `item` behind the others of `owner`."""
        with self._lock:
            if owner not in self._waiting:
                self._waiting[owner] = deque()
                self._used[owner] = max(self._used.get(owner, 0.0), self._level)
            self._waiting[owner].append(item)
        self._filled.release()

    def get(self) -> T | None:
        """Wait for the next item and return it; None: the queue has ended for one of its threads."""
        self._filled.acquire()
        with self._lock:
            if not self._waiting:
                return None
            owner = min(self._waiting, key=self._used.__getitem__)
            self._level = max(self._level, self._used[owner])
            item = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            return item

    def charge(self, owner: str, seconds: float) -> None:
        """Count the time that an item of `owner` took."""
        with self._lock:
            self._used[owner] = max(self._used.get(owner, 0.0), self._level) + seconds
            if len(self._used) > 2 * len(self._waiting) + 64:
                self._used = {
                    name: used
                    for name, used in self._used.items()
                    if used > self._level or name in self._waiting
                }

    def end(self) -> None:
        """Let one thread end once everything queued before is done."""
        self._filled.release()

    def __len__(self) -> int:
        with self._lock:
            return sum(len(items) for items in self._waiting.values())
