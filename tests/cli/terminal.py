"""A command in a terminal of its own (a pty), typed into and read as a user does."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import ioctl

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07|[\r\x07]")
_ASKS_POSITION = b"\x1b[6n"


class Terminal:
    """A running command and what it has written."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._raw = b""
        self._answered = 0

    @property
    def text(self) -> str:
        """All that was written, without control sequences."""
        return _CONTROLS.sub("", self._raw.decode(errors="replace"))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, expected: str, timeout_s: float = 60.0, after: int = 0) -> int:
        """Read until `expected` stands in the text behind position `after`; return where it ends."""
        deadline = time.monotonic() + timeout_s
        while (found := self.text.find(expected, after)) < 0:
            if time.monotonic() > deadline or not self._read(deadline):
                raise AssertionError(f"no {expected!r} in {self.text[after:][-2000:]!r}")
        return found + len(expected)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Read until the command ends; return its exit status."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(time.monotonic() + 0.1)
        return self.process.wait(1)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self._raw += piece
        if (asked := self._raw.count(_ASKS_POSITION)) > self._answered:
            self._answered = asked
            os.write(self._master, b"\x1b[1;1R")
        return bool(piece)


def _as_a_terminals() -> None:
    """Make the pty the command's terminal, and let Ctrl-C reach it: whoever runs the tests may ignore it."""
    ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def terminal(command: Sequence[str], environment: dict[str, str] | None = None) -> Iterator[Terminal]:
    """Run ``stemma COMMAND`` on a pty of 100 x 40 characters."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "stemma", *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
        start_new_session=True,
        preexec_fn=_as_a_terminals,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(master)
