"""An event loop whose clock jumps to the next timer as soon as nothing is left to do.

So the proxy's own coroutines, with their timeouts, run through minutes of a fleet in seconds, and the same
way each time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its time begins at 0 and passes only while all tasks wait for timers. Without sockets or threads."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def pass_time(self, seconds: float) -> None:
        """Let the clock jump."""
        self._now += seconds


class _Jumping(selectors.SelectSelector):
    """Waits by letting the loop's time pass."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another one: virtual time would stand still")
        self._loop.pass_time(max(0.0, timeout))
        return []  # what wakes the loop from other threads isn't used


def run_in_virtual_time(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end on a loop of its own; return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
