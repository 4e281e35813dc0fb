"""Copies of device blocks on their way to slow tiers: into staging now, or later, once there is room.

The step loop pays one memcpy a block. What finds no room waits on the device, where it stays readable as
long as it is in the index, and is copied when a slot is free again. Nothing is lost silently: what leaves the
device before there is room is counted by reason.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from stemma.memory.device.copy import BlockCopy
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.staging import StagingArena
from stemma.memory.tiers.write_queue import StagedBlock, WriteQueue
from stemma.types import BlockKey

DropReason = Literal["buffer_full", "evicted_waiting"]
DROP_REASONS: tuple[DropReason, ...] = ("buffer_full", "evicted_waiting")
"""A block that can't wait found no room; one that waited left the device before there was room."""
LONGEST_STALL_S = 0.1
"""For which blocks that leave the device hold up the step loop until there is room."""
_STEPS = 2
"""One is written while the next one is computed."""
_LEAST_BYTES = 128 * 2**20
_LEAST_SLOTS = 4


def num_staging_slots(staging_bytes: int | None, block_bytes: int, block_size: int, step_tokens: int) -> int:
    """Return how many blocks can be in transfer to slow tiers.

    `staging_bytes` None: what two steps of `step_tokens` tokens commit, and 128 MiB at least.
    """
    if staging_bytes is not None:
        return max(_LEAST_SLOTS, staging_bytes // block_bytes)
    return max(_LEAST_SLOTS, _STEPS * -(-step_tokens // block_size), _LEAST_BYTES // block_bytes)


class CopiesDown:
    """One owner, the step loop, but for `num_waiting`, `dropped` and `arena`, which are for any thread."""

    def __init__(
        self,
        device: BlockCopy,
        num_slots: int,
        on_staged: Callable[[WriteQueue, Sequence[DeviceBlock]], None],
        *,
        may_wait: bool,
    ) -> None:
        """`on_staged` is told of what is queued.

        `may_wait`: whether blocks stay readable until they `leave`.
        """
        self._on_staged = on_staged
        self._device = device
        self._num_slots = num_slots
        self._may_wait = may_wait
        self._arena: StagingArena | None = None
        self._allocating = threading.Lock()
        self._waiting: dict[BlockKey, tuple[DeviceBlock, tuple[WriteQueue, ...]]] = {}
        self._dropped: Counter[DropReason] = Counter()

    @property
    def arena(self) -> StagingArena:
        """Allocated when the first slow tier is attached."""
        with self._allocating:
            if self._arena is None:
                self._arena = StagingArena(
                    self._num_slots, self._device.block_bytes, pin_memory=self._device.pins_memory
                )
            return self._arena

    @property
    def num_waiting(self) -> int:
        """Number of blocks that wait for room."""
        return len(self._waiting)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of blocks that weren't copied, by reason; every reason is there."""
        return {reason: self._dropped[reason] for reason in DROP_REASONS}

    def is_waiting(self, key: BlockKey, queue: WriteQueue) -> bool:
        """Return whether a block waits for room, to be queued there."""
        return key in self._waiting and queue in self._waiting[key][1]

    def copy(self, blocks: Sequence[DeviceBlock], queues: Sequence[WriteQueue]) -> None:
        """Copy blocks to staging and queue them; those without room wait, if they may."""
        if not self._may_wait:
            self.copy_leaving(blocks, queues)
            return
        # Nothing overtakes what waits: parents come first.
        num_taken = 0 if self._waiting else len(self._stage(blocks, queues))
        for block in blocks[num_taken:]:
            others = self._waiting[block.key][1] if block.key in self._waiting else ()
            self._waiting[block.key] = (block, (*others, *queues))

    def copy_leaving(self, blocks: Sequence[DeviceBlock], queues: Sequence[WriteQueue]) -> None:
        """As `copy`, of blocks that can't wait, or for a moment at most."""
        self._dropped["buffer_full"] += len(blocks) - len(self._stage_soon(blocks, queues))

    def copy_waiting(self) -> bool:
        """Copy what waits, as far as there is room; return whether something waits still."""
        while self._waiting and self.arena.num_free:
            _, queues = next(iter(self._waiting.values()))
            alike = [block for block, others in self._waiting.values() if others == queues]
            for block in self._stage(alike, queues):
                del self._waiting[block.key]
        return bool(self._waiting)

    def renew(self, blocks: Sequence[DeviceBlock]) -> None:
        """Let those of these blocks that wait go down with the hints that they have now."""
        for block in blocks:
            if block.key in self._waiting:
                self._waiting[block.key] = (block, self._waiting[block.key][1])

    def leave(self, blocks: Sequence[DeviceBlock]) -> None:
        """Copy those of these blocks that wait, if there is room in a moment: they leave the device."""
        found = [self._waiting.pop(block.key) for block in blocks if block.key in self._waiting]
        end = time.monotonic() + LONGEST_STALL_S
        for block, queues in found:
            if not self._stage_soon([block], queues, end):
                self._dropped["evicted_waiting"] += 1

    def forget(self, blocks: Sequence[DeviceBlock]) -> None:
        """Leave blocks out: they are gone, and nobody wants them below."""
        for block in blocks:
            self._waiting.pop(block.key, None)

    def finish(self, timeout_s: float) -> None:
        """Copy all that waits, as slots become free, for so long at most."""
        end = time.monotonic() + timeout_s
        while self.copy_waiting() and (left_s := end - time.monotonic()) > 0:
            self.arena.wait_free(left_s)
        self._dropped["evicted_waiting"] += len(self._waiting)
        self._waiting.clear()

    def _stage_soon(
        self, blocks: Sequence[DeviceBlock], queues: Sequence[WriteQueue], end: float | None = None
    ) -> Sequence[DeviceBlock]:
        """Copy leading blocks, waiting for room until `end` of the clock; None: for the longest stall."""
        taken = self._stage(blocks, queues)
        end = time.monotonic() + LONGEST_STALL_S if end is None else end
        while len(taken) < len(blocks) and (left_s := end - time.monotonic()) > 0:
            self.arena.wait_free(left_s)
            taken = [*taken, *self._stage(blocks[len(taken) :], queues)]
        return taken

    def _stage(self, blocks: Sequence[DeviceBlock], queues: Sequence[WriteQueue]) -> Sequence[DeviceBlock]:
        """Copy leading blocks off the device, once, and queue them; return them."""
        slots = self.arena.take(len(blocks), len(queues))
        taken = blocks[: len(slots)]
        self._device.out([block.block_id for block in taken], [self.arena.tensor(slot) for slot in slots])
        staged = [StagedBlock(block, slot) for block, slot in zip(taken, slots, strict=True)]
        for queue in queues:
            queue.put(staged)
            self._on_staged(queue, taken)
        return taken
