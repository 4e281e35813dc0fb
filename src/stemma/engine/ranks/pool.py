"""The pools of the other ranks: opened, attached, detached and waited for together with rank 0's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from stemma.config.settings import PoolSettings, WritePolicy
from stemma.engine.ranks.leader import Ranks
from stemma.engine.ranks.messages import Tell
from stemma.errors import StemmaError
from stemma.types import Tier


class OtherPools:
    """Each rank has a client of its own, for its part of each block."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def open(self, settings: PoolSettings) -> None:
        """Open a pool on the other ranks; slow, for any thread. Raises what the first that fails says."""
        try:
            self._wait(self._ranks.ask("open_pool", settings))
        except StemmaError:
            self.drop()
            raise

    def drop(self) -> None:
        """Close what was opened and isn't attached. Slow."""
        self._wait(self._ranks.ask("drop_pool"))

    def attach(self, write: WritePolicy) -> None:
        """Use what was opened from the next step on. For the step loop."""
        self._ranks.tell(Tell("attach_pool", (write,)))

    def detach(self) -> Callable[[], None]:
        """Stop using the pools, for the step loop; the result waits until queued writes are done."""
        asked = self._ranks.ask("detach_pool")
        return lambda: self._wait(asked)

    def wait_for_queued(self, timeout_s: float) -> None:
        """Wait until the writes queued so far have ended, or the time is over. Not for the step loop."""
        for one in self._ranks.ask("wait_for_queued", Tier.POOL, timeout_s):
            with suppress(TimeoutError):
                one.result(timeout_s)

    def _wait(self, asked: list[Future[Any]]) -> None:
        """Wait for all answers, as long as a backend takes; raise the first error."""
        errors = [error for one in asked if (error := one.exception()) is not None]
        if errors:
            raise errors[0]
