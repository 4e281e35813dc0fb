"""How long the ingress waits for a replica before another one is asked: by the rules of the proxy.

A stream's first byte is late after what was measured of that replica's prefill. A whole answer is waited for
as long as its replica answers checks. Serve's controller ends replicas that hang; until then this keeps
requests from waiting for one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from stemma_router.cluster.prefill_speed import PrefillSpeed
from stemma_router.cluster.replica_calls import RoutedCall
from stemma_router.routing.relay import Relayed

_LOOK_EVERY_S = 2.0
_SILENT_CHECKS = 3
"""In a row, after which what a replica had is asked of another one."""

Answers = Callable[[str], Awaitable[bool]]
"""Whether the replica with this name answers a check in time."""


class Patience:
    """What is known of the speed and the silence of each replica. For one event loop."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._speeds: dict[str, PrefillSpeed] = {}
        self._checks: dict[str, asyncio.Task[bool]] = {}
        """Of replicas that somebody waits for."""

    async def answer_of(
        self, asking: asyncio.Future[Response], routed: RoutedCall, *, is_streamed: bool
    ) -> Response | None:
        """Return the answer of the replica that `routed` went to; None: it is late, or silent.

        Raises HTTPError. Without an answer `asking` is ended.
        """
        begun = time.monotonic()
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=_LOOK_EVERY_S)
                name = routed.name
                if asking.done() or not name or not routed.can_move:
                    continue  # Serve hasn't found it a replica, or there is no other one
                if is_streamed and time.monotonic() - begun > self._speed(name).limit_s(routed.num_tokens):
                    return None
                if not is_streamed and await self._is_silent(name, asking):
                    return None
            answer = asking.result()
            if isinstance(answer, Relayed) and routed.name:
                self._speed(routed.name).observe(routed.num_tokens, time.monotonic() - begun)
            return answer
        finally:
            if not asking.done():
                await _end(asking)

    async def _is_silent(self, name: str, asking: asyncio.Future[Response]) -> bool:
        """Return whether a replica left several checks unanswered; False as soon as the answer is there.

        All that wait for the replica share the checks.
        """
        check = self._checks.get(name)
        if check is None:
            check = self._checks[name] = asyncio.create_task(self._stays_silent(name))
            check.add_done_callback(lambda _: self._checks.pop(name, None))
        waited_for: set[asyncio.Future[Any]] = {asking, check}
        await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        return not asking.done() and check.done() and check.result()

    async def _stays_silent(self, name: str) -> bool:
        for _ in range(_SILENT_CHECKS):
            if await self._answers(name):
                return False
        return True

    def _speed(self, name: str) -> PrefillSpeed:
        return self._speeds.setdefault(name, PrefillSpeed())


async def _end(asking: asyncio.Future[Response]) -> None:
    asking.cancel()
    [answer] = await asyncio.gather(asking, return_exceptions=True)
    if isinstance(answer, Relayed):
        await answer.drop()
