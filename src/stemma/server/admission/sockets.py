"""Open sockets, counted from accept on: where there is no room, those that ask nothing make it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from stemma.budgets import Budget


class OpenSocket:
    """One socket. Its owner tells what it does; `close` is replaced as it becomes a connection."""

    def __init__(self, sockets: OpenSockets, close: Callable[[], None]) -> None:
        self._sockets = sockets
        self.close = close
        """Ends it at once."""

    def waits(self) -> None:
        """A request is awaited or half-sent: its headers, its body, or the handshake before them."""
        self._sockets.moved(self, self._sockets.half_sent)

    def works(self) -> None:
        """A whole request is here and not answered yet."""
        self._sockets.moved(self, None)

    def idles(self) -> None:
        """All requests are answered; another one may come."""
        self._sockets.moved(self, self._sockets.idle)

    def ended(self) -> None:
        """It is closed; a second call does nothing."""
        self._sockets.ended(self)


class OpenSockets:
    """All sockets of one port. For one event loop: not thread-safe."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.half_sent: OrderedDict[OpenSocket, None] = OrderedDict()
        """Oldest first, and so in `idle`."""
        self.idle: OrderedDict[OpenSocket, None] = OrderedDict()
        self.num_dropped = 0
        """Half-sent requests and idle connections that made room for newer ones."""
        self._open: set[OpenSocket] = set()

    def accepted(self, close: Callable[[], None]) -> OpenSocket:
        """Count a socket in; if all places are taken, the oldest half-sent request, or else the oldest idle
        connection, is closed for it.

        Raises Overloaded if all others are at work.
        """
        if self.budget.held() >= self.budget.limit and (self.half_sent or self.idle):
            self._drop(next(iter(self.half_sent or self.idle)))
        self.budget.take(1)
        opened = OpenSocket(self, close)
        self._open.add(opened)
        self.half_sent[opened] = None
        return opened

    def moved(self, opened: OpenSocket, where: OrderedDict[OpenSocket, None] | None) -> None:
        """Put a socket, if it is open, at the end of one of the lists, unless it is there already."""
        if opened not in self._open or (where is not None and opened in where):
            return
        self.half_sent.pop(opened, None)
        self.idle.pop(opened, None)
        if where is not None:
            where[opened] = None

    def ended(self, opened: OpenSocket) -> None:
        """Count a socket out."""
        if opened in self._open:
            self._open.discard(opened)
            self.half_sent.pop(opened, None)
            self.idle.pop(opened, None)
            self.budget.give_back(1)

    def close(self) -> None:
        """Close what hasn't sent a whole request."""
        for opened in list(self.half_sent):
            self._drop(opened)

    def _drop(self, opened: OpenSocket) -> None:
        self.num_dropped += 1
        self.ended(opened)
        opened.close()
