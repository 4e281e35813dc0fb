"""Accepts connections: each is counted at once, and costs no memory of ours before its first byte.

asyncio's own servers count nothing, and begin TLS (buffers, an OpenSSL object) for sockets that never say a
word.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from functools import partial

import uvicorn

from stemma.errors import Overloaded
from stemma.server.door.sockets import OpenSocket, OpenSockets
from stemma.server.transport.connections import ACCEPT_BURST

logger = logging.getLogger(__name__)
TLS_BUFFER_BYTES = 32 * 1024
"""Buffer that asyncio reads TLS into, two records: its own 256 KiB are held by each connection."""
_STARTUP_FAILURE = 3
"""The exit code that uvicorn has for it."""
_PAUSE_S = 0.1
"""How long nothing is accepted after the process had no descriptor left."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MakeProtocol = Callable[[OpenSocket], asyncio.Protocol]


class Acceptor:
    """One listening socket. `close` and `wait_closed` are those of asyncio's servers."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: MakeProtocol,
        tls: ssl.SSLContext | None,
        sockets: OpenSockets,
        header_timeout_s: float,
    ) -> None:
        """Start. `header_timeout_s` counts from accept to the end of the TLS handshake too."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._sockets = sockets
        self._timeout_s = header_timeout_s
        self._starting: set[asyncio.Task[None]] = set()
        self._is_closed = False
        if tls is not None:
            SSLProtocol.max_size = TLS_BUFFER_BYTES
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept nothing more, and close connections that have sent no request."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener.fileno())
        self._sockets.close()

    async def wait_closed(self) -> None:
        """Wait until no handshake is under way."""
        await asyncio.gather(*self._starting, return_exceptions=True)

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPT_BURST):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                logger.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_PAUSE_S, self._listen)
                return
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        """Count a socket in and wait for its first byte."""
        accepted.setblocking(False)
        silent = _Silent(accepted, self._loop)
        try:
            opened = self._sockets.accepted(silent.close)
        except Overloaded:
            logger.warning("%d connections are at work: closing new ones", self._sockets.budget.limit)
            accepted.close()
            return
        deadline = self._loop.time() + self._timeout_s
        silent.wait(deadline, opened, partial(self._begin, accepted, opened, deadline))

    def _begin(self, accepted: socket.socket, opened: OpenSocket, deadline: float) -> None:
        task = self._loop.create_task(self._connect(accepted, opened, deadline))
        opened.close = task.cancel  # type: ignore[assignment]
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _connect(self, accepted: socket.socket, opened: OpenSocket, deadline: float) -> None:
        """Make a connection of a socket, with a TLS handshake where there is TLS."""
        left_s = max(0.1, deadline - self._loop.time())
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(opened),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else left_s,
            )
        except (OSError, ssl.CertificateError) as error:
            logger.debug("no connection: %s", error)
            self._gone(accepted, opened)
        except BaseException:
            self._gone(accepted, opened)
            raise

    def _gone(self, accepted: socket.socket, opened: OpenSocket) -> None:
        opened.ended()
        accepted.close()


class _Silent:
    """An accepted socket before its first byte."""

    def __init__(self, accepted: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._accepted = accepted
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._opened: OpenSocket | None = None
        self._begin: Callable[[], None] = lambda: None

    def wait(self, deadline: float, opened: OpenSocket, begin: Callable[[], None]) -> None:
        """Call `begin` once there is something to read; close at `deadline`, on the loop's clock."""
        self._opened, self._begin = opened, begin
        self._timer = self._loop.call_at(deadline, self.close)
        self._loop.add_reader(self._accepted.fileno(), self._readable)

    def close(self) -> None:
        """Close the socket."""
        self._stop()
        self._accepted.close()
        if self._opened is not None:
            self._opened.ended()

    def _readable(self) -> None:
        self._stop()
        self._begin()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._accepted.fileno() >= 0:
            self._loop.remove_reader(self._accepted.fileno())


class AdmittingServer(uvicorn.Server):
    """uvicorn's server on listening sockets that are given to it, with our way to accept."""

    def __init__(self, config: uvicorn.Config, sockets: OpenSockets, header_timeout_s: float) -> None:
        super().__init__(config)
        self._sockets = sockets
        self._header_timeout_s = header_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and listen."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(_STARTUP_FAILURE)
        config = self.config

        def make(opened: OpenSocket) -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                opened=opened,
            )

        self.servers = [
            Acceptor(each, make, config.ssl, self._sockets, self._header_timeout_s)  # type: ignore[misc]
            for each in sockets or ()
        ]
        self.started = True
