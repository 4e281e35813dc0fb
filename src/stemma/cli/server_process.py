"""A ``stemma serve`` of our own on a free loopback port, as a child process that ends with this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from stemma.cli.ready_line import READY
from stemma.errors import StemmaError
from stemma.native.library import prepare_kernels
from stemma.supervision import LoggingSupervisor, start_thread

_STOP_TIMEOUT_S = 45.0
"""Longer than the drain that it asks for."""
_LAST_LINES_S = 1.0
"""Wait for what it logged last; a process that it started may hold the pipe open for longer."""
_KEPT_LINES = 200
"""Lines of its log that are kept for the case that it doesn't start."""


class ServerProcess:
    """Context manager: starts the server and waits until it takes requests; stops it at the end."""

    def __init__(self, model: Path, flags: Sequence[str] = (), log: Path | None = None) -> None:
        """`log`: the file that what it reports is appended to; None: the last lines are kept in memory."""
        self._log = log
        self._lifeline: int | None = None
        self._command = [sys.executable, "-m", "stemma", "serve", str(model), "--port", "0", *flags]
        self._process: subprocess.Popen[str] | None = None
        self._logged: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader: threading.Thread | None = None
        self.url = ""
        self.summary = ""
        """The server's own line about itself."""

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Its process id; it has been started."""
        assert self._process is not None
        return self._process.pid

    def start(self, on_line: Callable[[str], None] = lambda line: None) -> None:
        """Start it; raise StemmaError with its last words if it dies before it is ready.

        `on_line`: gets what it reports on stderr until it is ready, on another thread; nothing if that goes
        to a file.
        """
        prepare_kernels()  # here, where what it says is seen: the server's own words go to the log
        theirs, self._lifeline = os.pipe()
        try:
            self._process = self._started(theirs)
        finally:
            os.close(theirs)
        assert self._process.stdout is not None
        is_ready = threading.Event()

        def read_log(log: Iterable[str]) -> None:
            for line in log:
                self._logged.append(line.rstrip())
                if not is_ready.is_set():
                    on_line(line.rstrip())

        if self._process.stderr is not None:
            reading = partial(read_log, self._process.stderr)
            self._reader = start_thread("server-log", reading, LoggingSupervisor())
        lines: list[str] = []
        for line in self._process.stdout:
            if line.startswith(READY):
                is_ready.set()
                self.url = line.removeprefix(READY).split()[0]
                self.summary = "\n".join(lines)
                return
            if line.strip():
                lines.append(line.strip())
        self._process.wait()
        self._close()
        if self._log is not None:
            self._logged.extend(self._log.read_text("utf-8", errors="replace").splitlines())
        words = "\n".join([*lines, *self._logged][-20:])
        raise StemmaError(f"the server did not start: {words}")

    def _started(self, lifeline: int) -> subprocess.Popen[str]:
        with ExitStack() as stack:
            log = subprocess.PIPE if self._log is None else stack.enter_context(self._log.open("ab"))
            return subprocess.Popen(
                [*self._command, "--lifeline", str(lifeline)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",  # a log may hold any bytes, and a reader that dies would block the server
                start_new_session=True,
                pass_fds=[lifeline],
            )

    def is_running(self) -> bool:
        """Return whether the process lives; it has been started."""
        assert self._process is not None
        return self._process.poll() is None

    def stop(self) -> int:
        """Drain and stop it, if it runs; return its exit code."""
        self.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> int:
        """End it at once, as a crash would; return its exit code (negative: the signal)."""
        self.send_signal(signal.SIGKILL)
        return self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until it has ended, but not for ever; return its exit code."""
        assert self._process is not None
        try:
            return self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._close()

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.join(_LAST_LINES_S)
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)
