"""Device blocks that were loaded before anybody asked for them, and what became of them."""

from __future__ import annotations

from stemma.types import BlockIds


class LoadedAhead:
    """Those that wait for their use, and counters since the start."""

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        self.num_loaded = 0
        self.num_used = 0
        """Used while they were on the device."""
        self.num_wasted = 0
        """Left the device before anybody used them."""

    @property
    def num_waiting(self) -> int:
        """Blocks on the device that nobody has used yet."""
        return len(self._waiting)

    def add(self, block_ids: BlockIds) -> None:
        """Note blocks that arrived."""
        self._waiting.update(block_ids.tolist())
        self.num_loaded += len(block_ids)

    def use(self, block_ids: BlockIds) -> None:
        """Note that a request shares these blocks."""
        self.num_used += self._take(block_ids)

    def drop(self, block_ids: BlockIds) -> None:
        """Note that these blocks leave the device."""
        self.num_wasted += self._take(block_ids)

    def _take(self, block_ids: BlockIds) -> int:
        if not self._waiting:
            return 0
        taken = self._waiting.intersection(block_ids.tolist())
        self._waiting -= taken
        return len(taken)
