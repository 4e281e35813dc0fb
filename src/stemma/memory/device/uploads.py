"""Copies to a device that are queued and not over: steps are queued behind them, the host doesn't wait."""

from __future__ import annotations

import threading
from typing import Any

import torch

from stemma.memory.device.accelerator import accelerator_of


class Uploads:
    """The ends of copies whose blocks may be used already. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator = accelerator_of(device)
        self._ends: list[Any] = []
        self._lock = threading.Lock()

    def add(self, end: Any) -> None:
        """Note copies that are over once the event `end` is, before anybody is told of their blocks."""
        with self._lock:
            self._ends.append(end)

    def remove(self, end: Any) -> None:
        """Forget copies that are over."""
        with self._lock:
            self._ends.remove(end)

    def order(self) -> None:
        """Let what this thread's stream gets from now on run after these copies."""
        if not self._ends:
            return
        with self._lock:
            ends = list(self._ends)
        for end in ends:
            self._accelerator.run_after(end)
