"""The contract of a pool backend: byte values by text key, somewhere outside this process.

A backend is deliberately dumb. Deadlines, the circuit breaker, checksums, the negative cache and retries live
once, in front of every backend (`pool/pool_store.py`). A third party writes one class with these methods and
names it in the entry point group ``stemma.pools``.

Rules (tests/contracts/pool_backend_suite.py):

* Values are immutable: a put under a key that exists keeps the old value.
* What is wrong with one key is a result. A call that failed as a whole (no connection, wrong answer) raises
  StorageError. Any other exception is treated in the same way, and logged.
* All methods may be called from several threads at once, and may block; nobody waits for them for ever.
* A value comes and goes as *parts*: buffers whose concatenation is the value. So a header and a block that
  lie apart need no copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from stemma.memory.tiers.block_store import PutResult, ReadResult

Parts: TypeAlias = tuple[memoryview, ...]
"""One value: C-contiguous buffers of format ``B``; writable where they are read into."""


class PoolBackend(ABC):
    """Immutable byte values by text key (`pool/keys.py`: at most 200 characters of ``[A-Za-z0-9._%~-]``)."""

    zero_copy: bool = False
    """Whether `register` makes transfers from and into that memory cheaper."""

    @abstractmethod
    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """Return which keys are present. Raises StorageError if nobody answers."""

    @abstractmethod
    def get_many(self, keys: Sequence[str], into: Sequence[Parts]) -> list[ReadResult]:
        """Read each value into its parts: HIT, MISS, ERROR, or CORRUPT if its length differs."""

    @abstractmethod
    def put_many(self, keys: Sequence[str], values: Sequence[Parts]) -> list[PutResult]:
        """Store each value: STORED, EXISTS, NO_SPACE or ERROR."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> int:
        """Drop keys even where someone read them just now; return how many were there."""

    @abstractmethod
    def close(self) -> None:
        """Free connections and memory; a second call does nothing."""

    def register(self, memory: memoryview) -> None:
        """Announce memory that values will be read into or written from, for its whole life."""
        return None


def part_bytes(parts: Parts) -> int:
    """Return the length of the value that `parts` make up."""
    return sum(part.nbytes for part in parts)
