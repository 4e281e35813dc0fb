"""Listening, serving and stopping: SIGTERM or Ctrl-C drains, a second one cuts off.

While draining, the server still answers: running requests finish, new ones get 503, and `/health` returns 503
so that a load balancer uses another server. SIGHUP reads certificates and API keys again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import Settings
from stemma.engine.client import EngineClient
from stemma.engine.core import tally
from stemma.server.app import create_app
from stemma.server.door.access import Access
from stemma.server.door.ledger import Admission
from stemma.server.door.sockets import OpenSockets
from stemma.server.lifecycle import Lifecycle
from stemma.server.observe import request_log
from stemma.server.observe.logs import set_up_logs, show_log
from stemma.server.transport.acceptor import AdmittingServer
from stemma.server.transport.connections import make_protocol, open_sockets, quiet_logs
from stemma.server.transport.planes import Listeners, PlaneFilter, PlaneListener

logger = logging.getLogger(__name__)
EXIT_CLEAN = 0
EXIT_CUT_OFF = 1
"""Some requests didn't finish in time and were aborted."""
EXIT_ENGINE_FAILED = 1
"""A thread of the engine failed, or its device is lost. What supervises the process starts it again."""
_CLOSE_TIMEOUT_S = 5
"""Time after the drain for clients to read the end of their answers."""


class _PortServer(AdmittingServer):
    """uvicorn's server on one port. Signals and the app's lifespan belong to the main port's."""

    def __init__(
        self,
        app: ASGIApp,
        port: PlaneListener,
        settings: ServerSettings,
        sockets: OpenSockets,
        *,
        is_main: bool = False,
    ) -> None:
        config = uvicorn.Config(
            PlaneFilter(app, port.planes),
            log_config=None,
            access_log=False,
            lifespan="on" if is_main else "off",
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
            timeout_keep_alive=math.ceil(settings.keep_alive_s),
            http=make_protocol(settings),
            ws="none",
            server_header=False,
        )
        config.load()
        config.ssl = port.tls
        super().__init__(config, sockets, settings.header_timeout_s)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


class _DrainingServer(_PortServer):
    """The main port's, except that the first signal drains before it stops."""

    def __init__(
        self,
        app: ASGIApp,
        port: PlaneListener,
        engine: EngineClient,
        lifecycle: Lifecycle,
        settings: Settings,
        sockets: OpenSockets,
    ) -> None:
        super().__init__(app, port, settings.server, sockets, is_main=True)
        self.exit_code = EXIT_CLEAN
        self._engine = engine
        self._lifecycle = lifecycle
        self._timeout_s = settings.server.drain_timeout_s
        self._num_signals = 0
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Take signals as uvicorn does."""
        with uvicorn.Server.capture_signals(self):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal; called by the interpreter at any point, so nothing else happens here."""
        self._num_signals += 1
        if self._num_signals > 1:
            self.exit_code = EXIT_CUT_OFF
            self.force_exit = True
            self.should_exit = True

    def stop(self, timeout_s: float | None) -> None:
        """Drain and stop as a signal does, in no more than `timeout_s`."""
        if timeout_s is not None:
            self._timeout_s = min(self._timeout_s, timeout_s)
        self._num_signals = max(1, self._num_signals)

    async def on_tick(self, counter: int) -> bool:
        """Start draining once a signal has come or the engine has failed; runs ten times a second."""
        if self._engine.failure is not None and self.exit_code != EXIT_ENGINE_FAILED:
            self.exit_code = EXIT_ENGINE_FAILED
            logger.critical(
                "%s; this process ends with code %d: start it again", self._engine.failure, self.exit_code
            )
        if (self._num_signals or self._engine.failure is not None) and self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_stop())
        return await super().on_tick(counter)

    async def _drain_and_stop(self) -> None:
        self._lifecycle.draining = True
        if not await self._engine.drain(self._timeout_s):
            self.exit_code = EXIT_CUT_OFF
        self.should_exit = True


def serve(
    engine: EngineClient, settings: Settings, listeners: Listeners, on_ready: Callable[[str], None]
) -> int:
    """Serve until a signal stops it; return the exit code. Closes the engine.

    `on_ready` gets the main port's URL. The ports of other planes answer until the main one has ended.
    """
    quiet_logs()
    show_wanted_logs(settings)
    app = create_app(engine, settings)
    main = listeners.main
    sockets, *beside = open_sockets(settings.server, len(listeners.ports))
    lifecycle: Lifecycle = app.state.lifecycle
    admission: Admission = app.state.admission
    admission.add(*(one.budget for one in (sockets, *beside)))
    server = _DrainingServer(app, main, engine, lifecycle, settings, sockets)
    lifecycle.stop = server.stop
    others = [
        (_PortServer(app, port, settings.server, own), port.listener)
        for port, own in zip(listeners.ports[1:], beside, strict=True)
    ]

    async def run() -> None:
        _reload_on_hangup(listeners, app.state.access)
        tasks = [asyncio.create_task(other.serve(sockets=[listener])) for other, listener in others]
        on_ready(main.url)
        try:
            await server.serve(sockets=[main.listener])
        finally:
            for other, _ in others:
                other.should_exit = True
                other.force_exit = server.force_exit
            await asyncio.gather(*tasks)

    try:
        asyncio.run(run())
    finally:
        engine.close()
    return server.exit_code


def show_wanted_logs(settings: Settings) -> None:
    """Write the lines that the settings ask for to standard error."""
    set_up_logs(settings.server)
    if settings.server.log_requests:
        show_log(request_log.logger.name)
    if settings.engine.scheduler.log_hits:
        show_log(tally.logger.name)


def _reload_on_hangup(listeners: Listeners, access: Access) -> None:
    """Read certificates and keys again on SIGHUP, if there are any; without, the signal keeps its meaning."""
    has_tls = any(port.tls is not None for port in listeners.ports)

    def reload() -> None:
        listeners.reload_certificates()
        access.reload_keys()

    if (has_tls or access.keys is not None) and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
