"""Recordings of kernels, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def record(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a recording of `work`, replayed until it is warm."""
    recording = torch.cuda.CUDAGraph()
    work()
    torch.cuda.synchronize()
    with torch.cuda.graph(recording):
        work()
    for _ in range(3):
        recording.replay()
    return recording


def replay(recording: torch.cuda.CUDAGraph) -> tuple[float, float]:
    """Replay it once; return the seconds that the device took, and those until the host had launched it."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start = time.perf_counter()
    before.record()
    recording.replay()
    after.record()
    host_s = time.perf_counter() - start
    after.synchronize()
    return float(before.elapsed_time(after)) * 1e-3, host_s
