"""Separate ports for business, management and metrics: which path answers where, and their sockets.

Without separate ports, one port serves everything.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType

from starlette.types import ASGIApp, Receive, Scope, Send

from stemma.config.server_settings import TLSSettings
from stemma.config.settings import Settings
from stemma.errors import ConfigError
from stemma.server.errors import json_response
from stemma.server.transport.tls import ReloadableContext


class Plane(StrEnum):
    """The purpose of a port."""

    BUSINESS = "business"
    MANAGEMENT = "management"
    METRICS = "metrics"


_MANAGEMENT = re.compile(
    r"/(?:admin|dashboard|health|info|metrics-json|stopService|v1/config|v1/status|v1/engine-server|v1/(?:un)?load_lora_adapter|v2/health|v2/status)(?:/.*)?"
    r"|/v2/models/[^/]+/(?:ready|getSlotCount)"
    r"|/health/timed.*"
)
_EVERYWHERE = ("/health",)
DIRECT_SEND = "stemma.send"
"""Where a request's scope has the port's own `send`, without what middlewares do."""


def plane_of(path: str) -> Plane | None:
    """Return the plane that a path belongs to; None: it answers on all."""
    if path in _EVERYWHERE:
        return None
    if path == "/metrics":
        return Plane.METRICS
    return Plane.MANAGEMENT if _MANAGEMENT.fullmatch(path) else Plane.BUSINESS


class PlaneFilter:
    """The application as one port shows it: paths of other planes are 404."""

    def __init__(self, app: ASGIApp, planes: frozenset[Plane]) -> None:
        self._app = app
        self._planes = planes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests of this plane."""
        if scope["type"] == "http":
            plane = plane_of(scope["path"])
            if plane is not None and plane not in self._planes:
                message = f"{scope['path']} answers on the {plane} port, not on this one"
                body = {"error": message, "error_type": "NotFoundError"}
                await json_response(body, 404)(scope, receive, send)
                return
            scope[DIRECT_SEND] = send
        await self._app(scope, receive, send)


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the base URL under which `listener` is reached."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclass(slots=True)
class PlaneListener:
    """A port: its socket, what it serves, its certificates."""

    planes: frozenset[Plane]
    listener: socket.socket
    tls: ReloadableContext | None

    @property
    def url(self) -> str:
        """The base URL under which it is reached."""
        return url_of(self.listener, "http" if self.tls is None else "https")


@dataclass(slots=True)
class Listeners:
    """Every port of a server; a context manager that closes them. The first is the main one."""

    ports: list[PlaneListener]
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def main(self) -> PlaneListener:
        """The business plane's."""
        return self.ports[0]

    def reload_certificates(self) -> None:
        """Read every certificate again."""
        for port in self.ports:
            if port.tls is not None:
                port.tls.reload()

    def __enter__(self) -> Listeners:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


BACKLOG = 2048
"""Connections that the kernel queues while the server is busy."""
Listen = Callable[[str, int], socket.socket]
PROBE_S = 30
"""Seconds of silence after which TCP asks whether the client is still there."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise ConfigError if the address can't be had. Port 0: any free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # Connections inherit it; asyncio sets it only on sockets whose protocol number is given. Without it
        # a second small write waits for the acknowledgement of the first: 40 ms with most clients.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # An answer that isn't streamed says nothing for minutes: probes keep what lies between awake.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(
            socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", socket.TCP_KEEPINTVL), PROBE_S
        )
        return listener
    except OSError as error:
        raise ConfigError(f"can't listen on {host} port {port}: {error.strerror or error}") from error


def listen_planes(settings: Settings, listen: Listen) -> Listeners:
    """Open every port that the settings ask for.

    Raises ConfigError if an address can't be had or a certificate can't be read; then nothing stays open.
    Planes with the same address share a port; its certificates are those of the first of them.
    """
    with ExitStack() as stack:
        ports: list[PlaneListener] = []
        for (host, port, _), planes in _addresses(settings).items():
            first = min(planes, key=list(Plane).index)
            tls = _tls_of(settings, first)
            context = None if tls.cert is None else ReloadableContext(tls)
            listener = stack.enter_context(listen(host, port))
            ports.append(PlaneListener(frozenset(planes), listener, context))
        return Listeners(ports, stack.pop_all())


def _addresses(settings: Settings) -> dict[tuple[str, int, Plane | None], list[Plane]]:
    """Return which planes each address serves, the business plane's first. Port 0 is never shared."""
    server, planes = settings.server, settings.planes
    beside = planes.management_host or server.host
    wanted = {
        Plane.BUSINESS: (server.host, server.port),
        Plane.MANAGEMENT: (beside, planes.management_port),
        Plane.METRICS: (beside, planes.metrics_port),
    }
    found: dict[tuple[str, int, Plane | None], list[Plane]] = {}
    main: tuple[str, int, Plane | None] | None = None
    for plane, (host, port) in wanted.items():
        if port is None:
            assert main is not None, "the business plane always has a port"
            found[main].append(plane)
            continue
        address = (host, port, plane if port == 0 else None)
        main = main or address
        found.setdefault(address, []).append(plane)
    return found


def _tls_of(settings: Settings, plane: Plane) -> TLSSettings:
    own = {
        Plane.BUSINESS: settings.tls,
        Plane.MANAGEMENT: settings.management_tls,
        Plane.METRICS: settings.metrics_tls,
    }[plane]
    return own if own.cert is not None else settings.tls
