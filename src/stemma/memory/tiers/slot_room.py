"""How many bytes the slots of a store really take, where blocks are kept packed.

A slot has addresses for a whole block, but takes pages only for what lies in it: memory that was never
touched, or a hole of a file, costs nothing. So a store has more slots than whole blocks would fit, and this
keeps it within its budget. A free slot keeps its pages, as the next block goes there, until they are wanted
elsewhere. Not thread-safe: the store's lock is held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_LEAST_RATIO = 0.6
"""Of a block's bytes, how few it may take on average before slots, not bytes, bound a store."""
PAGE_BYTES = 4096


def num_slots(budget_bytes: int, slot_bytes: int, table_bytes: int = 0) -> int:
    """Return how many slots suffice for a budget; a slot takes `table_bytes` even if it is empty."""
    return int(budget_bytes / (_LEAST_RATIO * slot_bytes + table_bytes))


class SlotRoom:
    """Bytes by slot, whole pages, and their sum."""

    def __init__(self, num_slots: int, slot_bytes: int, budget_bytes: int, head_bytes: int = 0) -> None:
        """`slot_bytes`: whole pages; `head_bytes` of them lie before a block."""
        self._slot_bytes, self._budget_bytes, self._head_bytes = slot_bytes, budget_bytes, head_bytes
        self.num_bytes = 0
        """Taken by all slots, free ones too, and by those that are being written: all they may take."""
        self._taken: npt.NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        """What a slot takes; of one that is being written, what it took before."""
        self._idle: dict[int, None] = {}
        """Free slots that have pages."""

    @property
    def num_whole(self) -> int:
        """Whole blocks that fit without an eviction."""
        idle = int(self._taken[list(self._idle)].sum())
        return max(0, self._budget_bytes - self.num_bytes + idle) // self._slot_bytes

    def capacity(self, num_blocks: int, stored_bytes: int) -> int:
        """Return how many blocks fit that are stored like these."""
        mean = stored_bytes / num_blocks if num_blocks else self._slot_bytes
        return min(len(self._taken), int(self._budget_bytes / self._paged(int(mean))))

    def fits(self, slot: int | None = None) -> bool:
        """Return whether a slot may take all of its bytes; None: one that has none yet."""
        more = self._slot_bytes - (0 if slot is None else int(self._taken[slot]))
        return self.num_bytes + more <= self._budget_bytes

    def reserve(self, slot: int) -> None:
        """Count a slot as full until `settle`."""
        self._idle.pop(slot, None)
        self.num_bytes += self._slot_bytes - int(self._taken[slot])

    def settle(self, slot: int, num_bytes: int) -> range:
        """Note how long the block is that was written to a reserved slot. Returns as `take`."""
        self.num_bytes -= self._slot_bytes - int(self._taken[slot])
        return self.take(slot, num_bytes)

    def take(self, slot: int, num_bytes: int) -> range:
        """Note how long the block of a slot is now; return the bytes of the slot that are left over."""
        return self._keep(slot, self._paged(num_bytes))

    def _keep(self, slot: int, num_bytes: int) -> range:
        before = int(self._taken[slot])
        self._taken[slot] = num_bytes
        self.num_bytes += num_bytes - before
        return range(num_bytes, before)

    def _paged(self, num_bytes: int) -> int:
        return paged(self._head_bytes + num_bytes)

    def forget(self) -> None:
        """Note that no slot has pages any more, and none is being written."""
        self.num_bytes = 0
        self._taken[:] = 0
        self._idle.clear()

    def leave(self, slots: Sequence[int]) -> None:
        """Note that slots are free."""
        self._idle.update(dict.fromkeys(slots))

    def pop_idle(self, but: int) -> int | None:
        """Return a free slot, other than `but`, whose pages are to be given back, or None."""
        self._idle.pop(but, None)
        return self._idle.popitem()[0] if self._idle else None

    def give_back(self, slot: int) -> range:
        """Note that a free slot has no pages any more; return the bytes whose pages it had."""
        self._idle.pop(slot, None)
        return self._keep(slot, 0)


def paged(num_bytes: int) -> int:
    """Return the bytes of the pages that so many bytes take."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
