"""Writes blocks into a slow store in a background thread.

The step loop pays one memcpy per block, into staging; after that the device block may be reused. The queue is
bounded by the staging arena. When it is full the newest blocks are dropped and counted: a cache may drop
blocks but must not stall. An unexpected error is reported to the supervisor; its blocks count as not written,
and the thread continues, so that no caller waits forever.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stemma.errors import StorageError
from stemma.memory.tiers.block_store import BlockPut, BlockStore, PutResult
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.staging import StagingArena
from stemma.supervision import Supervisor, start_thread
from stemma.types import BlockKey, RetentionHint

logger = logging.getLogger(__name__)
BATCH_BLOCKS = 16
_MAX_RENEWED = 1 << 16
Work = Callable[[], bool]
"""Does a little background work; returns whether there is more."""


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """Bytes in a staging slot; each queue that holds this is one of the slot's owners."""

    block: DeviceBlock
    slot: int


class WriteQueue:
    """One store, one thread."""

    def __init__(
        self,
        store: BlockStore,
        staging: StagingArena,
        *,
        supervisor: Supervisor,
        idle_work: Work | None = None,
        on_failed: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        """`idle_work` runs on the same thread whenever `wake` is called or a second passed. `on_failed` is
        told which blocks the store didn't take."""
        self._on_failed = on_failed
        self.store = store
        self._staging = staging
        self._idle_work = idle_work
        self._changed = threading.Condition()
        self._blocks: deque[StagedBlock] = deque()
        self._touches: deque[list[BlockKey]] = deque(maxlen=256)
        self._renewed: dict[BlockKey, RetentionHint] = {}
        """Hints that the store learns once nothing that it queued before is left to write."""
        self._keys: set[BlockKey] = set()
        self._num_put = 0
        self._num_done = 0
        self._is_busy = False
        self._is_awake = False
        self._is_closing = False
        self._name = f"stemma-write-{store.tier}"
        self._supervisor = supervisor
        self._thread = start_thread(self._name, self._run, supervisor)

    @property
    def num_queued(self) -> int:
        """Number of blocks that wait to be written."""
        return len(self._blocks)

    def has(self, key: BlockKey) -> bool:
        """Return whether a block is queued for the store."""
        return key in self._keys

    def put(self, staged: Sequence[StagedBlock]) -> None:
        """Queue blocks; this queue is one of the owners of each."""
        with self._changed:
            if self._is_closing:
                self._num_put += len(staged)
                self._free(list(staged))
                return
            self._blocks.extend(staged)
            self._keys.update(one.block.key for one in staged)
            self._num_put += len(staged)
            self._changed.notify_all()

    def touch(self, keys: list[BlockKey]) -> None:
        """Count blocks of a local store as used, later; if too many wait, the oldest are dropped."""
        with self._changed:
            self._touches.append(keys)
            self._changed.notify_all()

    def renew(self, hints: Mapping[BlockKey, RetentionHint]) -> None:
        """Give blocks of a local store other hints, later, queued ones too; too many that wait: none."""
        with self._changed:
            if len(self._renewed) > _MAX_RENEWED:
                self._renewed.clear()
            self._renewed.update(hints)
            self._changed.notify_all()

    def wake(self) -> None:
        """Run the idle work soon."""
        with self._changed:
            self._is_awake = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything queued is written; return whether it was."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._has_queued() or self._is_busy or self._is_awake), timeout_s
            )

    def wait_for_queued(self, timeout_s: float) -> bool:
        """Wait until the writes queued before this call have ended; return whether they have."""
        with self._changed:
            target = self._num_put
            return self._changed.wait_for(lambda: self._num_done >= target, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued, as far as the time allows, and end the thread."""
        self.drain(timeout_s)
        with self._changed:
            self._is_closing = True
            self._free([self._blocks.popleft() for _ in range(len(self._blocks))])
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._write_until_closed()
        finally:  # ends the wait of whoever drains this queue
            with self._changed:
                self._is_closing, self._is_busy, self._is_awake = True, False, False
                self._touches.clear()
                self._renewed.clear()
                self._free([self._blocks.popleft() for _ in range(len(self._blocks))])

    def _write_until_closed(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(self._has_work, timeout=1.0)
                if self._is_closing:
                    return
                count = min(BATCH_BLOCKS, len(self._blocks))
                batch = [self._blocks.popleft() for _ in range(count)]
                touches = [self._touches.popleft() for _ in range(len(self._touches))]
                renewed: dict[BlockKey, RetentionHint] = {}
                if not self._blocks:
                    renewed, self._renewed = self._renewed, renewed
                self._is_awake = False
                self._is_busy = True
            self._work(batch, touches, renewed)

    def _has_work(self) -> bool:
        return self._has_queued() or self._is_awake or self._is_closing

    def _has_queued(self) -> bool:
        return bool(self._blocks or self._touches or self._renewed)

    def _work(
        self,
        batch: list[StagedBlock],
        touches: list[list[BlockKey]],
        renewed: Mapping[BlockKey, RetentionHint],
    ) -> None:
        try:
            for keys in touches:
                self.store.touch(keys)
            if batch:
                self._write(batch)
            if renewed:
                self.store.renew(renewed)
            elif not batch and self._idle_work is not None and self._idle_work():
                self.wake()
        except StorageError as error:
            self._not_written(batch)
            logger.warning("%s: %s", self.store.tier, error)
        except Exception as error:  # noqa: BLE001 - reported
            self._not_written(batch)
            self._supervisor.on_thread_failure(self._name, error)
        finally:
            with self._changed:
                self._free(batch)

    def _write(self, batch: list[StagedBlock]) -> None:
        puts = []
        for one in batch:
            block = one.block
            data = self._staging.view(one.slot)
            puts.append(BlockPut(block.key, block.parent, data, block.hint, block.owner, block.session))
        results = self.store.put_many(puts)
        failed = [
            put.key
            for put, result in zip(puts, results, strict=True)
            if result not in (PutResult.STORED, PutResult.EXISTS)
        ]
        if failed:
            logger.debug("%s: %d of %d blocks not written", self.store.tier, len(failed), len(batch))
            if self._on_failed is not None:
                self._on_failed(failed)

    def _not_written(self, batch: list[StagedBlock]) -> None:
        if self._on_failed is not None and batch:
            self._on_failed([one.block.key for one in batch])

    def _free(self, batch: list[StagedBlock]) -> None:
        self._num_done += len(batch)
        self._changed.notify_all()
        for one in batch:
            self._keys.discard(one.block.key)
            self._staging.free(one.slot)
