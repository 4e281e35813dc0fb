"""Files read into the page cache by a thread while the interpreter still imports libraries.

Whoever maps a file waits for each piece of it; asked for all of it, the kernel reads at the disk's full rate
while others work.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from stemma.supervision import Supervisor, start_thread

AT_ONCE_BYTES = 64 << 20
"""Bytes asked for in one call of the system."""


def read_ahead(files: Sequence[Path], supervisor: Supervisor) -> Thread | None:
    """Begin to read whole files into the page cache; None where the system has no call for it."""
    if not hasattr(os, "posix_fadvise"):
        return None
    return start_thread("stemma-read-ahead", lambda: _ask_for(files), supervisor)


def _ask_for(files: Sequence[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):  # the load meets it again, and says what it is
            descriptor = os.open(file, os.O_RDONLY)
            try:
                for begin in range(0, os.fstat(descriptor).st_size, AT_ONCE_BYTES):
                    os.posix_fadvise(descriptor, begin, AT_ONCE_BYTES, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
