"""The thread that changes a router's holdings, so that events of many servers don't hold its event loop."""

from __future__ import annotations

from collections.abc import Callable

from stemma.supervision import LoggingSupervisor
from stemma.workers import WorkerThreads

_LONGEST_S = 3600.0
"""Longest single change, in seconds; none takes more than a few."""


class HoldingsWriter:
    """One thread; it starts with the first change. For one event loop."""

    def __init__(self) -> None:
        self._threads = WorkerThreads(1, "stemma-holdings", LoggingSupervisor())

    async def apply(self, change: Callable[[], None]) -> None:
        """Make a change after those before it; raises what it raises."""
        await self._threads.run(change, limit_s=_LONGEST_S, what="a change of holdings")

    def close(self) -> None:
        """Let the thread end after what it does now."""
        self._threads.close()
