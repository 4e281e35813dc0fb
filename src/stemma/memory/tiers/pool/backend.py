"""The contract of a pool backend: byte values by text key, somewhere outside this process.

A backend is deliberately simple. Deadlines, the circuit breaker, checksums, the negative cache and retries
are implemented once, in front of every backend (`pool/pool_store.py`). A third party writes one class with
these methods and registers it in the entry point group ``stemma.pools``.

Rules (tests/contracts/pool_backend_suite.py):

* Values are immutable: a put under a key that exists keeps the old value.
* A failure of one key is a result. A call that failed as a whole (no connection, wrong answer) raises
  StorageError. Any other exception is treated the same, and logged.
* All methods may be called from several threads at once, and may block; every caller has a deadline.
* A value is passed as *parts*: buffers whose concatenation is the value. So a header and a block in separate
  memory need no copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from stemma.memory.tiers.block_store import PutResult, ReadResult

Parts: TypeAlias = tuple[memoryview, ...]
"""One value: C-contiguous buffers of format ``B``; writable if they are read into."""


class PoolBackend(ABC):
    """Immutable byte values by text key (`pool/keys.py`: at most 200 characters of ``[A-Za-z0-9._%~-]``)."""

    zero_copy: bool = False
    """Whether `register` makes transfers from and into that memory cheaper."""

    @abstractmethod
    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """Return which keys are present. Raises StorageError if nobody answers."""

    @abstractmethod
    def get_many(self, keys: Sequence[str], into: Sequence[Parts]) -> list[ReadResult]:
        """Read each value into its parts: HIT, MISS, ERROR, or CORRUPT if it is longer.

        A shorter one fills the first bytes; the others are undefined then.
        """

    @abstractmethod
    def put_many(self, keys: Sequence[str], values: Sequence[Parts]) -> list[PutResult]:
        """Store each value: STORED, EXISTS, NO_SPACE or ERROR."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> int:
        """Drop keys, even if somebody reads them right now; return how many were there."""

    @abstractmethod
    def close(self) -> None:
        """Free connections and memory; a second call does nothing."""

    def register(self, memory: memoryview) -> None:
        """Announce memory that values are read into or written from, for as long as the memory exists."""
        return None


def part_bytes(parts: Parts) -> int:
    """Return the length of the value that `parts` make up."""
    return sum(part.nbytes for part in parts)
