"""Listening, serving and stopping: SIGTERM or Ctrl-C drains, a second one cuts off.

While it drains, the server still answers: running requests finish, new ones get 503, and `/health` says
503 so that a load balancer looks elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from stemma.config.settings import Settings
from stemma.engine.api import EngineClient
from stemma.errors import ConfigError
from stemma.server.app import create_app

EXIT_CLEAN = 0
EXIT_CUT_OFF = 1
"""Some requests didn't finish in time and were aborted."""
EXIT_ENGINE_FAILED = 1
"""A thread of the engine failed."""
_CLOSE_TIMEOUT_S = 5
"""After the drain: how long clients may take to read the end of their answers."""
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise ConfigError if the address can't be had. Port 0: any free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"can't listen on {host} port {port}: {error.strerror or error}") from error


def url_of(listener: socket.socket) -> str:
    """Return the base URL under which `listener` is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _DrainingServer(uvicorn.Server):
    """uvicorn's server, except that the first signal drains before it stops."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
            )
        )
        self.exit_code = EXIT_CLEAN
        self._context = app.state.context
        self._timeout_s = settings.server.drain_timeout_s
        self._num_signals = 0
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal; called by the interpreter at any point, so nothing else happens here."""
        self._num_signals += 1
        if self._num_signals > 1:
            self.exit_code = EXIT_CUT_OFF
            self.force_exit = True
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Start draining once a signal has come or the engine has failed; runs ten times a second."""
        if self._context.engine.failure is not None:
            self.exit_code = EXIT_ENGINE_FAILED
        if (self._num_signals or self._context.engine.failure is not None) and self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_stop())
        return await super().on_tick(counter)

    async def _drain_and_stop(self) -> None:
        self._context.draining = True
        if not await self._context.engine.drain(self._timeout_s):
            self.exit_code = EXIT_CUT_OFF
        self.should_exit = True


def serve(
    engine: EngineClient, settings: Settings, listener: socket.socket, on_ready: Callable[[str], None]
) -> int:
    """Serve until a signal stops it; return the exit code. `on_ready` gets the URL. Closes the engine."""
    app = create_app(engine, settings)
    server = _DrainingServer(app, settings)

    async def run() -> None:
        on_ready(url_of(listener))
        await server.serve(sockets=[listener])

    try:
        asyncio.run(run())
    finally:
        engine.close()
    return server.exit_code
