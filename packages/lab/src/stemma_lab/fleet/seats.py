"""The seats of a simulated server: so many answers are computed at once, the others wait in order."""

from __future__ import annotations

import asyncio

from stemma.smoothed import Smoothed


class SimulatedSeats:
    """All seats of a server, and how long answers had them."""

    def __init__(self, num_seats: int) -> None:
        self.free = asyncio.Semaphore(num_seats)
        self.num_seated = 0
        self.num_waiting = 0
        self.held_s = Smoothed()
        """Of answers that came to their end."""
        self.answer_tokens = Smoothed()


class Seat:
    """A request's seat, from when it has one until its answer ends."""

    def __init__(self, seats: SimulatedSeats) -> None:
        self._seats = seats
        self._since: float | None = None

    async def take(self) -> None:
        """Wait for it."""
        seats = self._seats
        seats.num_waiting += 1
        try:
            await seats.free.acquire()
        finally:
            seats.num_waiting -= 1
        seats.num_seated += 1
        self._since = asyncio.get_running_loop().time()

    def leave(self, num_tokens: int | None = None) -> None:
        """Give it to the next, if it was taken; `num_tokens` of an answer that came to its end."""
        since, self._since = self._since, None
        if since is None:
            return
        seats = self._seats
        seats.num_seated -= 1
        seats.free.release()
        if num_tokens is not None:
            seats.held_s.observe(asyncio.get_running_loop().time() - since)
            seats.answer_tokens.observe(num_tokens)
