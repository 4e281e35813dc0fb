"""Where a server is in its life: serving, paused by an operator, or draining."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Maintenance = Literal["paused", "ready"]
"""``paused``: no steps are run; ``ready``: nor are they after MindIE's reinitialisation, before its start."""


@dataclass(slots=True)
class Lifecycle:
    """One server's; lives in ``app.state.lifecycle``."""

    started_at: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""
    draining: bool = False
    maintenance: Maintenance | None = None
    """The condition that an operator's fault handling has left the engine in; None: it serves."""
    stop: Callable[[float | None], None] | None = None
    """Drains and stops the server within the given seconds; None if only its creator can stop it."""
