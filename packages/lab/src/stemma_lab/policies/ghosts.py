"""GhostQueue: recently evicted blocks by fingerprint, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict


class GhostQueue:
    """Fingerprints of evicted blocks, oldest first."""

    def __init__(self) -> None:
        # Not a plain dict: repeatedly taking its oldest key costs O(keys deleted before).
        self._queue: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, fingerprint: int) -> bool:
        return fingerprint in self._queue

    def remember(self, fingerprint: int, max_ghosts: int) -> None:
        """Add a fingerprint as the newest; drop the oldest beyond `max_ghosts`."""
        self._queue[fingerprint] = None
        self._queue.move_to_end(fingerprint)
        while len(self._queue) > max(max_ghosts, 0):
            self._queue.popitem(last=False)

    def recall(self, fingerprint: int) -> None:
        """Drop a fingerprint that is known: the block is back."""
        del self._queue[fingerprint]
