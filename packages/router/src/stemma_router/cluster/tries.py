"""The servers that one request is sent to, and when it goes nowhere else any more.

- What never reached a server, and what a server refuses to begin (429, 503), goes to the next one at once;
- what failed after it was sent is sent once more, within the budget of the server that gets it;
- what has answered a byte is never sent again.
"""

from __future__ import annotations

from stemma_router.cluster.fleet import Fleet, Try
from stemma_router.cluster.member import ASKED, FleetMember, Outcome
from stemma_router.cluster.routers import RoutedRequest

_MAX_REFUSALS = 3
"""Servers that a request is sent to which are too busy for whoever sent it: they may all be."""
_UNBEGUN = (Outcome.UNSENT, Outcome.BUSY, Outcome.REFUSED, Outcome.ELSEWHERE)
_BEGUN = (Outcome.FAILED, Outcome.LATE, Outcome.LOST)
"""Outcomes after which a server may have computed the request, and nobody has seen a byte."""


class Tries:
    """The servers that one request is sent to, one after the other, as long as `next` returns one."""

    def __init__(
        self, fleet: Fleet, ask: RoutedRequest, *, is_streamed: bool, is_optional: bool = False
    ) -> None:
        """`is_streamed`: the request's first byte comes once its prompt is computed.

        `is_optional`: others do without its answer. It goes to no server that can't be asked now, and is
        given up after twice the time that it should take.
        """
        self._fleet = fleet
        self._is_optional = is_optional
        self._ask = ask
        self._is_streamed = is_streamed
        self._done: list[Try] = []

    def next(self) -> Try | None:
        """Return the next try, begun; None: the last one's answer is the client's, or there is no server.

        Call it again once that try has ended.
        """
        last = self._done[-1] if self._done else None
        if last is not None and not self._goes_on(last):
            self._pardon(last)
            return None
        is_free = last is None or last.outcome in _UNBEGUN or last.outcome is Outcome.LOST
        equals = self._best()
        member = next((one for one in equals if is_free or one.budget.take()), None)
        if member is None:
            self._fleet.num_lost_retries += bool(equals)
            return None
        one = self._fleet.begin(
            member,
            self._ask,
            is_retry=last is not None,
            is_streamed=self._is_streamed,
            is_optional=self._is_optional,
        )
        self._done.append(one)
        return one

    def can_move(self) -> bool:
        """Return whether another server that can be asked now would get the request, had this try failed.

        Else a server that is late is better waited for, unless the request is optional.
        """
        if self._is_optional:
            return True
        equals = self._best()
        can_serve = bool(equals) and equals[0].health.standing in ASKED
        has_failed = any(one.outcome in _BEGUN for one in self._done)
        return not has_failed and can_serve and any(one.budget.has_room() for one in equals)

    @property
    def may_go_on(self) -> bool:
        """Whether another server could get the request, if there were one. For after the last try's end."""
        return not self._done or self._goes_on(self._done[-1])

    def _best(self) -> list[FleetMember]:
        """Return the servers that may be asked next, best first: a reserve only if there are no others.

        An optional request goes to none of the reserve.
        """
        order = self._fleet.order(self._ask, without=[one.url for one in self._done])
        asked = [one for one in order if one.health.standing in ASKED]
        return asked if self._is_optional else asked or order

    def _goes_on(self, last: Try) -> bool:
        assert last.outcome is not None, "end a try before the next one"
        if last.outcome is Outcome.REFUSED:
            return sum(one.outcome is Outcome.REFUSED for one in self._done) < _MAX_REFUSALS
        if last.outcome in _UNBEGUN:
            return True
        if last.outcome not in _BEGUN or (self._is_optional and last.outcome is Outcome.LATE):
            return False
        failed = [one for one in self._done if one.outcome in _BEGUN]
        return len(failed) == 1

    def _pardon(self, last: Try) -> None:
        """Take back two equal failures on two servers: they are the request's own fault."""
        failed = [one for one in self._done if one.outcome is Outcome.FAILED]
        if last.outcome is Outcome.FAILED and len(failed) == 2:
            for one in failed:
                one.member.health.pardon(one.failure)
