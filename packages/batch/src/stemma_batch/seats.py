"""Seats that owners share: a free one goes to whoever of those that wait holds fewest."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class FairSeats:
    """For one event loop: not thread-safe."""

    def __init__(self, num_seats: int) -> None:
        self._num_free = num_seats
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, owner: str) -> None:
        """Wait for a seat, behind the others of `owner`."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(mine)
        self._seat()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.release(owner)
            raise

    def release(self, owner: str) -> None:
        """Give a seat of `owner` back."""
        self._num_free += 1
        self._held[owner] -= 1
        if self._held[owner] <= 0:
            del self._held[owner]
        self._seat()

    def _seat(self) -> None:
        """Give free seats to who waits."""
        while self._num_free and self._waiting:
            owner = min(self._waiting, key=lambda one: self._held[one])
            waiting = self._waiting[owner]
            first = waiting.popleft()
            if not waiting:
                del self._waiting[owner]
            if not first.done():  # it may have been cancelled
                self._num_free -= 1
                self._held[owner] += 1
                first.set_result(None)
