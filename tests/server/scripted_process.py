"""A scripted server in a process of its own, with real sockets."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

ROOT = Path(__file__).parents[2]


@dataclass
class Server:
    process: subprocess.Popen[str]
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
def serving(
    tokenizer: Path,
    num_files: int | None = None,
    *,
    tls: dict[str, str] | None = None,
    delay_s: float = 0.0,
    **server: Any,
) -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.server.scripted_server", str(tokenizer), str(delay_s), "1"]
    command.append(json.dumps({"server": server, **({} if tls is None else {"tls": tls})}))
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}

    def limit_files() -> None:
        if num_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=limit_files,
        )
        try:
            assert process.stdout is not None
            yield Server(process, process.stdout.readline().strip(), log)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def scripted_server(
    tokenizer_path: Path, delay_s: float, drain_s: float
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    arguments = [str(tokenizer_path), str(delay_s), str(drain_s)]
    command = [sys.executable, "-m", "tests.server.scripted_server", *arguments]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
