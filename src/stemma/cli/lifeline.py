"""A process that ends with the one that started it, however that ends: a pipe whose other end closes then.

The kernel's own way (`PR_SET_PDEATHSIG`) goes by the parent's thread, which may end long before the process.
"""

from __future__ import annotations

import os
import signal
from functools import partial

from stemma.supervision import LoggingSupervisor, start_thread


def end_with(lifeline: int) -> None:
    """Send this process SIGTERM once the pipe `lifeline`, a file descriptor open for reading, is closed."""
    start_thread("lifeline", partial(_wait_for_end, lifeline), LoggingSupervisor())


def _wait_for_end(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
