"""The pool tier: a `BlockStore` over one backend that tolerates every failure of the backend.

Observed failures of pools are handled here, once: a blocked call (deadline), a dead server (circuit breaker),
keys that are listed but can't be read (negative cache), a full server (retry, then NO_SPACE), lost, torn or
wrong bytes (header). Each is counted by reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from stemma.config.settings import PoolSettings
from stemma.errors import StorageError
from stemma.memory.device.block_codec import BlockCodec
from stemma.memory.tiers.block_store import (
    BlockPut,
    BlockStore,
    Loan,
    PutResult,
    ReadResult,
    StoreCounters,
    check_buffers,
)
from stemma.memory.tiers.device_block import NO_NOTES, BlockNotes
from stemma.memory.tiers.pool.absent import AbsentKeys
from stemma.memory.tiers.pool.backend import PoolBackend
from stemma.memory.tiers.pool.breaker import Circuit, CircuitBreaker
from stemma.memory.tiers.pool.guard import Guard
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.reads import ABSENT_FOR_S, BATCH_BLOCKS, Reader
from stemma.memory.tiers.pool.registered import RegisteredMemory
from stemma.memory.tiers.pool.shares import OwnerShares
from stemma.memory.tiers.pool.value_staging import Staging
from stemma.memory.tiers.pool.writes import Writer
from stemma.memory.tiers.recent_keys import NOTE_BYTES, RecentKeys
from stemma.types import BlockKey, Tier

_NUM_THREADS = 4
_MAX_NOTES = 1 << 14
"""Blocks read last: two prompts of 100,000 tokens."""
NOTES_BYTES = NOTE_BYTES * _MAX_NOTES


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The state of a pool in use, as `/admin/pool` shows it."""

    name: str
    circuit: Circuit
    """Closed: the pool answers. Otherwise every block is a miss until a probe succeeds."""
    num_opened: int
    """How often the circuit opened."""
    last_error: str | None
    counters: StoreCounters


class PoolStore(BlockStore):
    """One pool as a tier."""

    tier: ClassVar[Tier] = Tier.POOL

    def __init__(
        self,
        backend: PoolBackend,
        names: PoolKeys,
        block_bytes: int,
        settings: PoolSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        pin_memory: bool = False,
        codec: BlockCodec | None = None,
    ) -> None:
        """`pin_memory`: a CUDA device copies blocks out of what `lend_many` lends. `codec` packs what is put;
        what other servers packed is read with or without."""
        self.block_bytes = block_bytes
        self.settings = settings
        self._names = names
        self._guard = Guard(
            backend,
            deadline_s=settings.deadline_s,
            num_threads=_NUM_THREADS,
            breaker=CircuitBreaker(clock),
        )
        self.counters = self._guard.counters
        self._absent = AbsentKeys(clock)
        self._registered = RegisteredMemory()
        self.staging = Staging(settings.staging, block_bytes, pin_memory=pin_memory)
        """Memory that values are staged in, and how much of it is in use."""
        if backend.zero_copy:
            backend.register(self.staging.memory)
        self._notes = RecentKeys[BlockNotes](_MAX_NOTES)
        self._reader = Reader(self._guard, names, self.staging, self._registered, self._absent, self._notes)
        self._writer = Writer(self._guard, names, self.staging, self._registered, self._absent, codec)
        self._shares = OwnerShares()
        self._closed = False

    @property
    def reserved_bytes(self) -> int:
        """Upper limit of this process's memory: staging, the negative cache, notes of what was read."""
        return self.staging.reserved_bytes + self._absent.reserved_bytes + NOTES_BYTES

    def register(self, memory: memoryview) -> None:
        """Announce memory (a tier's arena) that blocks are read into and written from in place.

        Only backends that benefit (`PoolBackend.zero_copy`) use it. A read into registered memory is waited
        for until it ends, even past the deadline.
        """
        if self._guard.backend.zero_copy:
            self._guard.backend.register(memory)
            self._registered.add(memory)

    def exists_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Probe a prompt's chain of keys, in order, for this rank's part of each block.

        Asks for 64 blocks at a time. After a batch with a gap the later blocks count as absent without being
        asked for: they couldn't be used, and a probe has a cost (Mooncake can't evict probed keys for 10 s).
        """
        self._require_open()
        present = [False] * len(keys)
        for start in range(0, len(keys), BATCH_BLOCKS):
            some = range(start, min(start + BATCH_BLOCKS, len(keys)))
            asked = [at for at in some if keys[at] not in self._absent]
            if not asked or not self._probe(asked, keys, present) or len(asked) < len(some):
                break
        return present

    @override
    def notes_many(self, keys: Sequence[BlockKey]) -> list[BlockNotes]:
        return [self._notes.get(key, NO_NOTES) for key in keys]

    def get_many(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[ReadResult]:
        """Read this rank's part of each block."""
        self._require_open()
        check_buffers(keys, into, self.block_bytes)
        results = self._reader.read(keys, into)
        self._guard.count_reads(results, self.block_bytes)
        self._shares.touch(keys)
        return results

    def lend_many(self, keys: Sequence[BlockKey]) -> Loan:
        """Read this rank's part of the first few blocks into staging slots."""
        self._require_open()
        loan = self._reader.lend(keys)
        self._guard.count_reads(loan.results, self.block_bytes)
        self._shares.touch(keys[: len(loan.results)])
        return loan

    def put_many(self, blocks: Sequence[BlockPut]) -> list[PutResult]:
        """Write this rank's part of each block."""
        self._require_open()
        check_buffers([block.key for block in blocks], [block.data for block in blocks], self.block_bytes)
        results = self._writer.write(blocks)
        self._guard.count_puts(results, self.block_bytes)
        there = (PutResult.STORED, PutResult.EXISTS)
        counted = [block for block, result in zip(blocks, results, strict=True) if result in there]
        self._drop_over_quota(self._shares.written(counted))
        return results

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Count what this server writes for these owners from now on; beyond a quota the owner loses blocks.

        What other servers wrote isn't known here, nor what this one wrote before it started.
        """
        if not self._closed:
            self._drop_over_quota(self._shares.set_quotas(quotas))

    def _drop_over_quota(self, keys: Sequence[BlockKey]) -> None:
        if keys:
            self.remove(keys)
            self._guard.count_reason("over_quota", len(keys))

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Drop this rank's part of each block, without which no rank can use theirs."""
        self._require_open()
        if not keys or not self._guard.admits():
            return 0
        return self._guard.remove([self._names.own(key) for key in keys])

    def status(self) -> PoolStatus:
        """Return the pool's current state; sends a probe if the circuit is open and one is due."""
        if not self._closed:
            self._guard.admits()
        return PoolStatus(
            name=self.settings.name,
            circuit=self._guard.breaker.state,
            num_opened=self._guard.breaker.num_opened,
            last_error=self._guard.last_error,
            counters=self.counters.snapshot(),
        )

    def close(self) -> None:
        """Leave the pool; waits no longer than the deadline."""
        if self._closed:
            return
        self._closed = True
        self._guard.close()

    def _probe(self, asked: list[int], keys: Sequence[BlockKey], present: list[bool]) -> bool:
        """Fill in `present` for some keys; return whether all are there."""
        if not self._guard.admits():
            self._guard.count_reason("circuit_open", len(asked))
            return False
        names = [self._names.own(keys[at]) for at in asked]
        call = self._guard.start(self._guard.backend.exists_many, names)
        answer = self._guard.finish(call, len(asked))
        if answer.value is None:
            return False
        for at, is_there in zip(asked, answer.value, strict=True):
            present[at] = is_there
            if not is_there:
                self._absent.add(keys[at], ABSENT_FOR_S)
        return all(present[at] for at in asked)

    def _require_open(self) -> None:
        if self._closed:
            raise StorageError("the pool is closed")
