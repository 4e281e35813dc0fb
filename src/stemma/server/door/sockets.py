"""Open sockets, counted from accept on: where there is no room, those that ask nothing make it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto

from starlette.types import Scope

from stemma.budgets import Budget

SOCKET = "stemma.socket"
"""Where a request's scope has its `OpenSocket`, on ports of ours."""


class SocketWait(Enum):
    """What a socket is waiting for."""

    HALF_SENT = auto()
    """A request, or the rest of one: its headers, its body, or the handshake before them."""
    IDLE = auto()
    """All its requests are answered; another one may come."""
    UNREAD = auto()
    """Its client, who doesn't read what was answered."""


_FIRST_TO_GO = (
    (SocketWait.HALF_SENT, False),
    (SocketWait.IDLE, False),
    (SocketWait.UNREAD, False),
    (SocketWait.HALF_SENT, True),
    (SocketWait.IDLE, True),
)
"""With whether it has shown a key. Others are at work, or have their deadline."""


class OpenSocket:
    """One socket. Its owner tells what it does; `close` is replaced as it becomes a connection."""

    def __init__(self, sockets: OpenSockets, close: Callable[[], None]) -> None:
        self._sockets = sockets
        self.close = close
        """Ends it at once."""
        self.has_key = False
        """Whether a request with a valid key came on it."""

    def waits(self) -> None:
        """A request is awaited or half-sent."""
        self._sockets.moved(self, SocketWait.HALF_SENT)

    def works(self) -> None:
        """A whole request is here and not answered yet."""
        self._sockets.moved(self, None)

    def idles(self) -> None:
        """All requests are answered; another one may come."""
        self._sockets.moved(self, SocketWait.IDLE)

    def stalls(self) -> None:
        """Its client doesn't read what was answered."""
        self._sockets.moved(self, SocketWait.UNREAD)

    def shows_key(self) -> None:
        """A request with a valid key came on it."""
        if not self.has_key:
            self.has_key = True
            self._sockets.relisted(self)

    def ended(self) -> None:
        """It is closed; a second call does nothing."""
        self._sockets.ended(self)


class OpenSockets:
    """All sockets of one port. For one event loop: not thread-safe."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.num_dropped = 0
        """Sockets that made room for newer ones."""
        self._waiting: dict[tuple[SocketWait, bool], OrderedDict[OpenSocket, None]] = {
            one: OrderedDict() for one in _FIRST_TO_GO
        }
        """Those that may make room, by `_FIRST_TO_GO`, oldest first."""
        self._open: dict[OpenSocket, tuple[SocketWait, bool] | None] = {}
        """Which of these lists each is in; None: it is at work."""

    def accepted(self, close: Callable[[], None]) -> OpenSocket:
        """Count a socket in; if all places are taken, another one is closed for it (`_FIRST_TO_GO`).

        Raises Overloaded if all others are at work.
        """
        if self.budget.held() >= self.budget.limit and (first := self._first_to_go()) is not None:
            self._drop(first)
        self.budget.take(1)
        opened = OpenSocket(self, close)
        self._open[opened] = None
        opened.waits()
        return opened

    def moved(self, opened: OpenSocket, place: SocketWait | None) -> None:
        """Put a socket, if it is open, at the end of a list, unless it is there already; None: in none."""
        wanted = None if place is None else (place, opened.has_key)
        where = wanted if wanted in self._waiting else None
        if opened not in self._open or self._open[opened] == where:
            return
        self._leave(opened)
        self._open[opened] = where
        if where is not None:
            self._waiting[where][opened] = None

    def relisted(self, opened: OpenSocket) -> None:
        """Put a socket that has shown a key among those that have."""
        if (where := self._open.get(opened)) is not None:
            self.moved(opened, where[0])

    def ended(self, opened: OpenSocket) -> None:
        """Count a socket out."""
        if opened in self._open:
            self._leave(opened)
            del self._open[opened]
            self.budget.give_back(1)

    def close(self) -> None:
        """Close what hasn't sent a whole request."""
        for where in _FIRST_TO_GO:
            if where[0] is SocketWait.HALF_SENT:
                for opened in list(self._waiting[where]):
                    self._drop(opened)

    def _leave(self, opened: OpenSocket) -> None:
        if (where := self._open[opened]) is not None:
            del self._waiting[where][opened]

    def _first_to_go(self) -> OpenSocket | None:
        return next((opened for where in _FIRST_TO_GO for opened in self._waiting[where]), None)

    def _drop(self, opened: OpenSocket) -> None:
        self.num_dropped += 1
        self.ended(opened)
        opened.close()


def note_key(scope: Scope) -> None:
    """Note that a request carries a valid key: its socket is among the last to make room."""
    opened: OpenSocket | None = scope.get(SOCKET)
    if opened is not None:
        opened.shows_key()
