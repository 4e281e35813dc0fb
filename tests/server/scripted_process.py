"""A scripted server in a process of its own, with real sockets.

They are forked from a process that has imported what a server needs: importing takes longer than most tests.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any

import httpx

from tests.server import scripted_server as program

ROOT = Path(__file__).parents[2]
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([program.__name__])
# The process that others are forked from finds modules by this alone.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])


class ServerProcess:
    """A process that may get signals."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; raise TimeoutError if it doesn't end in time."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} runs on")
        return self._process.exitcode


@dataclass
class Server:
    process: ServerProcess
    url: str
    log: IO[str]

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", httpx.URL(self.url).port or 0

    def written(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def ask(self, request: bytes) -> bytes:
        """Send bytes and return everything until the server closes."""
        with socket.create_connection(self.address, timeout=10) as connection:
            connection.sendall(request)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
    return received


@contextmanager
def scripted_server(
    tokenizer_path: Path,
    delay_s: float = 0.0,
    drain_s: float = 5.0,
    settings: dict[str, Any] | None = None,
    *,
    log: Path | None = None,
    num_files: int | None = None,
) -> Iterator[tuple[ServerProcess, str]]:
    """Start a server with `settings` beside the usual ones; it may open `num_files` files."""
    ours, theirs = _PROCESSES.Pipe(duplex=False)
    arguments = (tokenizer_path, delay_s, drain_s, settings or {})
    process = _PROCESSES.Process(target=_serve, args=(theirs, log, num_files, arguments))
    process.start()
    theirs.close()
    try:
        yield ServerProcess(process), ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(
    sender: Connection[str, str],
    log: Path | None,
    num_files: int | None,
    arguments: tuple[Path, float, float, dict[str, Any]],
) -> None:
    if log is not None:
        with log.open("a") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    if num_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    sys.exit(program.run(*arguments, sender.send))


@contextmanager
def serving(
    tokenizer: Path,
    num_files: int | None = None,
    *,
    tls: dict[str, str] | None = None,
    delay_s: float = 0.0,
    **server: Any,
) -> Iterator[Server]:
    settings = {"server": server, **({} if tls is None else {"tls": tls})}
    with (
        tempfile.NamedTemporaryFile("r") as log,
        scripted_server(tokenizer, delay_s, 1.0, settings, log=Path(log.name), num_files=num_files) as (
            process,
            url,
        ),
    ):
        yield Server(process, url, log)
