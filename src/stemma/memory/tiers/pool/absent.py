"""The negative cache: keys that a pool didn't have, or couldn't deliver, a moment ago."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from stemma.types import BlockKey

_CAPACITY = 65536
_KEY_BYTES = 250
ABSENT_BYTES = _CAPACITY * _KEY_BYTES
"""Memory that the table takes at most, roughly."""


class AbsentKeys:
    """Bounded memory of keys not worth asking for; each is dropped after its own time. Thread-safe.

    Lifetimes are short, because other servers fill the pool.
    """

    def __init__(self, clock: Callable[[], float], *, capacity: int = _CAPACITY) -> None:
        self._clock = clock
        self._capacity = capacity
        self._until: OrderedDict[BlockKey, float] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """Memory that the table takes at most, roughly."""
        return _KEY_BYTES * self._capacity

    def add(self, key: BlockKey, for_s: float) -> None:
        """Remember `key` for `for_s` seconds; the oldest entry makes room if need be."""
        with self._lock:
            self._until.pop(key, None)
            self._until[key] = self._clock() + for_s
            if len(self._until) > self._capacity:
                self._until.popitem(last=False)

    def discard(self, key: BlockKey) -> None:
        """Drop `key`: it was just put."""
        with self._lock:
            self._until.pop(key, None)

    def __contains__(self, key: BlockKey) -> bool:
        with self._lock:
            until = self._until.get(key)
            if until is None:
                return False
            if self._clock() < until:
                return True
            del self._until[key]
            return False
