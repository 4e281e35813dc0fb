"""Limits of connections before any key is read: their number, the size of headers, and time.

uvicorn limits open requests and idle connections, but waits without limit for the rest of a request. This
module adds deadlines to its HTTP protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from stemma.budgets import Budget
from stemma.config.server_settings import ServerSettings
from stemma.server.door.sockets import SOCKET, OpenSocket, OpenSockets

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

logger = logging.getLogger(__name__)
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_URL_BYTES = 16 * 1024
_RESERVED_FILES = 128
"""Open files that aren't connections: tiers, libraries, logs; half of the limit, if that is less."""
_ANSWERED_BODY_TIMEOUT_S = 5.0
"""Time limit for the rest of a body whose request is answered already."""
_REPEAT_AFTER_S = 10.0
ACCEPT_BURST = 64
"""Connections accepted in one turn of the event loop; as many may be closing."""
_SIDE_PORT_PART = 8
"""A port of management or metrics has one connection for so many of the main one's."""
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_PROBE_S, _LAST_PROBE_S = 0.02, 1.0
MAX_PIPELINED = 32
"""Requests that wait behind one that isn't answered yet; clients of today send none."""
_BUFFER_BYTES = 64 * 1024
"""An answer's bytes that wait for the client; with more than that, whoever writes waits."""
_LEAST_READ_BYTES = _BUFFER_BYTES // 2
"""What a client must read of them in `send_timeout_s`: a trickle doesn't hold a connection."""


def raise_file_limit() -> int:
    """Let the process open as many files as it may; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def connection_limit(wanted: int, num_files: int) -> int:
    """Return how many connections may be open if the process may open `num_files` files."""
    return max(1, min(wanted, num_files - ACCEPT_BURST - min(_RESERVED_FILES, num_files // 2)))


def open_sockets(settings: ServerSettings, num_ports: int = 1) -> list[OpenSockets]:
    """Return the sockets of each port, the main one's first. Raises the process' limit of open files."""
    limit = connection_limit(settings.max_connections, raise_file_limit())
    beside = max(1, limit // _SIDE_PORT_PART)
    limits = [max(1, limit - (num_ports - 1) * beside), *(beside for _ in range(num_ports - 1))]
    names = ["connections", *(f"connections_{number}" for number in range(2, num_ports + 1))]
    return [
        OpenSockets(Budget(*one)) for one in zip(names, ("connections",) * num_ports, limits, strict=True)
    ]


def make_protocol(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """Return the protocol class for uvicorn's `http` option, with the limits of `settings`."""

    class LimitedProtocol(GuardedProtocol):
        header_timeout_s = settings.header_timeout_s
        body_timeout_s = settings.body_timeout_s
        send_timeout_s = settings.send_timeout_s

    return LimitedProtocol


class _UntilClosed(int):
    """Length of a body that ends with its connection: uvicorn compares it, and subtracts from it."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _UntilClosed:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class GuardedProtocol(HttpToolsProtocol):
    """One connection. It has two clocks: that of the part of a request being read, and that of its client,
    who has to read what was answered. Whoever doesn't loses the connection, and with it what runs for it.
    """

    header_timeout_s: float
    body_timeout_s: float
    send_timeout_s: float

    def __init__(self, *arguments: Any, opened: OpenSocket, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._opened = opened
        self._deadline: asyncio.TimerHandle | None = None
        self._is_reading_headers = False
        self._num_header_bytes = 0
        self._body_is_open = False
        self._peer_is_done = False
        """Whether the client has closed its half of the connection."""
        self._send_clock: asyncio.TimerHandle | None = None
        self._waits_for_reader = False
        """An answer is complete and hasn't left: what follows it begins afterwards."""
        self._running: RequestResponseCycle | None = None
        """The request being answered; `cycle` is the one read last, which may wait behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the headers."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        self._opened.close = transport.abort
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self._stop_clock()
        self._stop_send_clock()
        self._opened.ended()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more: it has left, or it has closed its half and waits for its answer.

        Return whether to keep the other half. Whoever has left answers an interim response with a reset.
        """
        is_answered = self.cycle is None or self.cycle.response_complete
        if is_answered or self._body_is_open or self.scheme == "https":
            return False
        self._peer_is_done = True
        if not self.cycle.response_started and self.scope["http_version"] != "1.0":
            self.transport.write(_PROBE)
        self.loop.call_later(_FIRST_PROBE_S, self._look_for_reset, _FIRST_PROBE_S)
        return True

    def _look_for_reset(self, waited_s: float) -> None:
        """Abort if the client has left: the loop doesn't watch a connection that has been read to its end."""
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        wait_s = min(_LAST_PROBE_S, 2 * waited_s)
        self.loop.call_later(wait_s, self._look_for_reset, wait_s)

    def data_received(self, data: bytes) -> None:
        """Parse; refuse headers that are too large."""
        is_idle = self._deadline is None and (self.cycle is None or self.cycle.response_complete)
        if is_idle and not self._body_is_open:
            self._wait_for_headers()
        self._num_header_bytes += len(data)
        super().data_received(data)
        if self._is_reading_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse("the request's headers are too large")

    def on_message_begin(self) -> None:
        """A request begins, maybe pipelined after another one."""
        super().on_message_begin()
        self.scope[SOCKET] = self._opened  # type: ignore[literal-required]
        self._is_reading_headers = True
        if not self.flow.write_paused:
            self._stop_send_clock()

    def on_headers_complete(self) -> None:
        """From now on the clock is that of the body. An exception is answered with 400."""
        size = sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS or len(self.url) > MAX_URL_BYTES:
            raise ValueError("too many headers, or too large ones")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests before the answer to the first")
        self._is_reading_headers = False
        self._body_is_open = True
        self._start_clock(self.body_timeout_s)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:  # it has no chunks
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClosed()

    def on_message_complete(self) -> None:
        """The request is whole: what follows is up to the application."""
        self._body_is_open = False
        self._num_header_bytes = 0
        self._stop_clock()
        self._opened.works()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin what is pipelined once the answer has left; don't wait long for a body that nobody reads."""
        self._start_send_clock()
        if self.flow.write_paused and not self.transport.is_closing():
            self._waits_for_reader = True
            self.flow.pause_reading()
            return
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._body_is_open:
            self._start_clock(min(self.body_timeout_s, _ANSWERED_BODY_TIMEOUT_S))
        elif self.cycle.response_complete:
            self._opened.idles()
            if self._peer_is_done:
                self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        """The client is slow, or doesn't read at all: start its clock."""
        super().pause_writing()
        self._opened.stalls()
        self._start_send_clock()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._stop_send_clock()
        self._opened.works()
        if self._waits_for_reader:
            self._waits_for_reader = False
            self.on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse and close, within the client's time."""
        super().send_400_response(msg)
        self._start_send_clock()

    def _start_send_clock(self) -> None:
        if self._send_clock is None and (num_bytes := self.transport.get_write_buffer_size()):
            self._send_clock = self.loop.call_later(self.send_timeout_s, self._look_at_reader, num_bytes)

    def _look_at_reader(self, num_before: int) -> None:
        """Abort unless the client has read enough of the bytes that waited for it."""
        self._send_clock = None
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and num_before - num_bytes < _LEAST_READ_BYTES:
            logger.info("a client doesn't read its answer: closing its connection")
            self.transport.abort()
        else:
            self._start_send_clock()

    def _stop_send_clock(self) -> None:
        if self._send_clock is not None:
            self._send_clock.cancel()
            self._send_clock = None

    def _wait_for_headers(self) -> None:
        self._is_reading_headers = True
        self._num_header_bytes = 0
        self._opened.waits()
        self._start_clock(self.header_timeout_s)

    def _start_clock(self, limit_s: float) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(limit_s, self._expire)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.abort()

    def _refuse(self, reason: str) -> None:
        self._stop_clock()
        if not self.transport.is_closing():
            self.send_400_response(reason)


class RepeatFilter(logging.Filter):
    """Lets each message pass once in a while: what strangers cause must not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write `record`."""
        if record.levelno >= logging.ERROR and record.exc_info:
            return True
        now = time.monotonic()
        if now - self._last.get(str(record.msg), -_REPEAT_AFTER_S) < _REPEAT_AFTER_S:
            return False
        self._last[str(record.msg)] = now
        return True


def quiet_logs() -> None:
    """Bound what malformed requests and floods of connections write into the log."""
    for name in ("uvicorn.error", __name__, "stemma.server.transport.acceptor"):
        log = logging.getLogger(name)
        if not any(isinstance(one, RepeatFilter) for one in log.filters):
            log.addFilter(RepeatFilter())
