"""The cores that this process may use."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def affinity_cores() -> int:
    """Return the number of cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota_cores(file: Path = _QUOTA_FILE) -> float | None:
    """Return the cores' time that the control group's `file` (cgroup v2) grants; None: no limit is known."""
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def usable_cores() -> int:
    """Return how many threads can compute at once: cores, or what a quota leaves of them."""
    quota = quota_cores()
    cores = affinity_cores()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))
