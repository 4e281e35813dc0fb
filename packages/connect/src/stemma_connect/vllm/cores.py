"""Cores for our threads in vLLM's worker on CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Within it, threads that start may run on every core that some thread of this process may use.

    OpenMP binds vLLM's worker thread to one core (KMP_AFFINITY), and threads inherit that: tiers and copies
    would all share that core with vLLM's own thread.
    """
    mine = os.sched_getaffinity(0)
    cores = set(mine)
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended
            cores |= os.sched_getaffinity(int(task))
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
