"""An adapter around a real backend that slows it down, breaks it or spoils what it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from stemma.errors import StorageError
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.pool.backend import Parts, PoolBackend


class FaultyBackend(PoolBackend):
    """Passes calls on; each fault is switched by an attribute and may be changed at any time."""

    def __init__(self, inner: PoolBackend) -> None:
        self.inner = inner
        self.zero_copy = inner.zero_copy
        self.gate = threading.Event()
        """Cleared: every call blocks until it is set."""
        self.gate.set()
        self.error: BaseException | None = None
        """Raised by every call."""
        self.spoil: Callable[[Parts], None] | None = None
        """Changes each value after it was read."""
        self.full_for = 0
        """How many further puts answer NO_SPACE."""
        self.num_results_lost = 0
        """Results that each answer lacks."""
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        """Name and keys of every call."""

    def _pass(self, name: str, keys: Sequence[str]) -> None:
        self.calls.append((name, tuple(keys)))
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error

    def num_asked(self, name: str) -> int:
        """Return how many keys all calls of `name` asked for."""
        return sum(len(keys) for called, keys in self.calls if called == name)

    def register(self, memory: memoryview) -> None:
        self.inner.register(memory)

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        self._pass("exists", keys)
        return self.inner.exists_many(keys)[self.num_results_lost :]

    def get_many(self, keys: Sequence[str], into: Sequence[Parts]) -> list[ReadResult]:
        self._pass("get", keys)
        results = self.inner.get_many(keys, into)
        if self.spoil is not None:
            for parts in into:
                self.spoil(parts)
        return results[self.num_results_lost :]

    def put_many(self, keys: Sequence[str], values: Sequence[Parts]) -> list[PutResult]:
        self._pass("put", keys)
        if self.full_for:
            self.full_for -= 1
            return [PutResult.NO_SPACE] * len(keys)
        return self.inner.put_many(keys, values)[self.num_results_lost :]

    def remove(self, keys: Sequence[str]) -> int:
        self._pass("remove", keys)
        return self.inner.remove(keys)

    def close(self) -> None:
        self.inner.close()


class DeadBackend(PoolBackend):
    """Nothing but errors, of a kind that no contract names."""

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        raise RuntimeError("boom")

    def get_many(self, keys: Sequence[str], into: Sequence[Parts]) -> list[ReadResult]:
        raise RuntimeError("boom")

    def put_many(self, keys: Sequence[str], values: Sequence[Parts]) -> list[PutResult]:
        raise RuntimeError("boom")

    def remove(self, keys: Sequence[str]) -> int:
        raise StorageError("boom")

    def close(self) -> None:
        raise RuntimeError("boom")
