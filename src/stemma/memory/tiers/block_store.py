"""The contract of a tier below the device: blocks of bytes by block key.

`host`, `disk` and every `pool` backend are block stores. One value is the contiguous bytes of one block
(`KVLayout.block_bytes`); a partial last block is stored at full size too. All calls are batched, with one
result per key, because one slow or broken block must not fail its neighbours.

Rules that every store keeps (tests/contracts/block_store_suite.py):

* `ReadResult.HIT` means: the buffer now holds exactly the bytes that were put under this key. A store that
  crosses a process, a file or a network proves it with a checksum that covers the key. After any other
  result the buffer's content is undefined.
* A failure of one block (missing, torn, late, no space) is a result, counted by reason, never an exception.
  Exceptions are for misuse: ValueError for a buffer of the wrong size, StorageError after `close`.
* A store may drop blocks but must not stall: `put_many` may refuse them. Bytes are copied or written before
  it returns, so the caller can reuse its buffers.
* All methods may be called from any thread. Only `host` is fast enough for the step loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol

from stemma.memory.kv_events import KVEventSink
from stemma.memory.tiers.device_block import NO_NOTES, BlockNotes
from stemma.types import NO_HINT, BlockKey, RetentionHint, Tier


class ReadResult(StrEnum):
    """Result of one key of `get_many`."""

    HIT = "hit"
    MISS = "miss"
    """The store doesn't hold the key."""
    CORRUPT = "corrupt"
    """It held bytes that failed their check; they were dropped."""
    LATE = "late"
    """It didn't answer within its time limit."""
    ERROR = "error"
    """It couldn't be read: I/O error, connection lost, circuit open."""


class PutResult(StrEnum):
    """Result of one block of `put_many`."""

    STORED = "stored"
    EXISTS = "exists"
    """The key was stored already; the old bytes stay (equal keys name equal bytes)."""
    NO_SPACE = "no_space"
    """Full, and nothing could be evicted."""
    DROPPED = "dropped"
    """Not taken: a queue is full, the store is read-only, or another thread is writing the same key."""
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class BlockPut:
    """One block on its way into a store."""

    key: BlockKey
    parent: BlockKey
    """Key of the block before it, or the root of its namespace; needed for leaves-first eviction."""
    data: memoryview
    """`block_bytes` bytes, C-contiguous, format ``B``."""
    hint: RetentionHint = NO_HINT
    """Without a time to live, the store's own holds."""
    owner: str = ""
    """The `owner_tag` of whose it is, for quotas; empty: nobody's."""
    session: int = 0
    """Number of the conversation that left it; 0: none was named."""


class Storable(Protocol):
    """The facts of a block, apart from its bytes, that a store needs; `BlockPut` and `DeviceBlock` have
    them."""

    @property
    def key(self) -> BlockKey:
        """Key of the block."""

    @property
    def parent(self) -> BlockKey:
        """Key of the block before it, or the root."""

    @property
    def hint(self) -> RetentionHint:
        """How firmly and how long it should stay."""

    @property
    def owner(self) -> str:
        """The `owner_tag` of whose it is, or nothing."""

    @property
    def session(self) -> int:
        """Number of the conversation that left it, or 0."""


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block that a store holds, as an operator may see it."""

    key: BlockKey
    parent: BlockKey
    """Key of the block before it, or the root of its namespace."""
    age_s: float
    """Seconds since it was last read or written there."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks read into the store's own memory, which stays untouched until `free` is called (once)."""

    results: list[ReadResult]
    """Results of the first keys asked for; at least one."""
    places: Sequence[memoryview]
    """Their buffers; one per result if any is a hit. Only those of hits may be read."""
    free: Callable[[], None] = lambda: None


@dataclass(slots=True)
class StoreCounters:
    """Counts of a store since it was opened. The store adds under its own lock; readers take `snapshot`."""

    reads: Counter[ReadResult] = field(default_factory=Counter)
    puts: Counter[PutResult] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Why a read or put failed, by a short snake_case reason: ``checksum``, ``truncated``, ``enospc``."""
    num_evicted: int = 0
    num_expired: int = 0
    read_bytes: int = 0
    """Bytes of hits."""
    written_bytes: int = 0
    """Bytes of stored blocks."""

    def snapshot(self) -> StoreCounters:
        """Return a copy that no longer changes."""
        return StoreCounters(
            Counter(self.reads),
            Counter(self.puts),
            Counter(self.reasons),
            self.num_evicted,
            self.num_expired,
            self.read_bytes,
            self.written_bytes,
        )


class BlockStore(ABC):
    """Blocks of `block_bytes` bytes by key."""

    tier: ClassVar[Tier]
    is_local: ClassVar[bool] = False
    """Whether this process alone uses the store, and knows everything it holds."""
    block_bytes: int
    counters: StoreCounters

    @property
    def reserved_bytes(self) -> int:
        """Upper limit of this process's memory that the store takes: arenas, buffers and, roughly, tables."""
        return 0

    def register(self, memory: memoryview) -> None:
        """Announce memory that blocks are read into and written from, for as long as the memory exists.

        A store that crosses a network may save a copy; others ignore it.
        """
        return None

    def watch(self, sink: KVEventSink) -> None:
        """Tell `sink` of blocks that enter and leave from now on; a shared store tells nothing."""
        return

    @abstractmethod
    def exists_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return, per key, whether a read now would probably hit. A hint: the read decides."""

    def notes_many(self, keys: Sequence[BlockKey]) -> list[BlockNotes]:
        """Return what is known of what blocks were put with; takes no lock."""
        return [NO_NOTES] * len(keys)

    @abstractmethod
    def get_many(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[ReadResult]:
        """Read each key into its own writable buffer of `block_bytes` bytes; counts as a use."""

    def fetch_many(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview]
    ) -> Callable[[], list[ReadResult]]:
        """Do the slow part of `get_many`; return a function that does the rest and returns the results.

        Call that function once. Another thread may call it, so that checksums are verified during the next
        read. Until then the buffers must not be read or changed, and the store can't be closed.
        """
        results = self.get_many(keys, into)
        return lambda: results

    def lend_many(self, keys: Sequence[BlockKey]) -> Loan | None:
        """Do as `get_many` for the first few keys, into the store's own memory; None if it has none to lend.

        Saves a copy in stores whose reads go through such memory anyway.
        """
        return None

    @abstractmethod
    def put_many(self, blocks: Sequence[BlockPut]) -> list[PutResult]:
        """Store blocks, evicting others (leaves first) where the store is full."""

    @abstractmethod
    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Drop the keys that are stored and not in use; return how many were dropped."""

    @abstractmethod
    def close(self) -> None:
        """Free memory, files and connections; a second call does nothing."""

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Set how many blocks each owner (`owner_tag`) may hold; others hold any number.

        Who holds more loses own blocks, leaves first and the least recently used of them first, now and at
        every put. May be slow: O(blocks).
        """
        return None

    # Only a store of this process alone (`is_local`) can do these; a shared one ignores them.

    def newest(self, max_blocks: int) -> list[HeldBlock]:
        """Return the `max_blocks` blocks that entered last, newest first; a shared store lists none."""
        return []

    @property
    def num_blocks(self) -> int | None:
        """Blocks held now; None: unknown, the store is shared."""
        return None

    @property
    def capacity_blocks(self) -> int | None:
        """Blocks that fit; None: unknown."""
        return None

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the blocks held now as they are stored, packed or not; None: unknown."""
        return None

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Count keys that are held as used now, in order from the root."""
        return None

    def renew(self, hints: Mapping[BlockKey, RetentionHint]) -> None:
        """Let other hints hold for keys that are held."""
        return None

    def pin(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Forbid eviction and removal of each key that is held; counted, so pins nest. Return which were."""
        return [False] * len(keys)

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Take back one `pin` of each key. Raises ValueError if a key isn't pinned."""
        return None

    def clear(self) -> int:
        """Drop every block that isn't pinned; return how many were dropped."""
        return 0

    def expire(self) -> int:
        """Drop unpinned blocks, leaves first, that went unused beyond their limit; return how many."""
        return 0

    def sync(self) -> None:
        """Write what a restart needs to know."""
        return None

    def check(self) -> None:
        """Prove the invariants by brute force (slow); raise IntegrityError if one is broken."""
        return None


def check_buffers(keys: Sequence[BlockKey], buffers: Sequence[memoryview], block_bytes: int) -> None:
    """Raise ValueError unless there is one buffer of `block_bytes` bytes per key."""
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers")
    for buffer in buffers:
        if buffer.nbytes != block_bytes or not buffer.contiguous:
            raise ValueError(f"a buffer must be {block_bytes} contiguous bytes, not {buffer.nbytes}")
