"""One GPU, tried: what it is, whether kernels compile and run, its memory, and how fast copies are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stemma.config.sizes import format_size
from stemma.errors import ConfigError
from stemma.memory.device.accelerator import Accelerator
from stemma.memory.device.pinned import host_rows

COPIED_BYTES = 2**28
_LEAST_CAPABILITY = (8, 0)
LEAST_RATE = 6e9
"""Bytes a second: four lanes of PCIe's fourth generation."""


@dataclass(frozen=True, slots=True)
class Card:
    """What was found."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    free_bytes: int
    total_bytes: int
    triton: str
    """``works``, or why not."""
    up_rate: float | None
    """Bytes a second from pinned memory; None: it couldn't be measured."""
    down_rate: float | None
    problems: tuple[str, ...]
    """Each with what to do."""

    @property
    def text(self) -> str:
        """A line."""
        rates = [f"{rate / 1e9:.1f} GB/s" for rate in (self.up_rate, self.down_rate) if rate is not None]
        copies = f"copies {rates[0]} up, {rates[1]} down" if rates else "copies not measured"
        memory = f"{format_size(self.free_bytes)} free of {format_size(self.total_bytes)}"
        capability = "{}.{}".format(*self.capability)
        return (
            f"{self.name}, capability {capability}, {self.num_multiprocessors} multiprocessors; {memory}; "
            f"Triton {self.triton}; {copies}"
        )


def examine_card(accelerator: Accelerator, triton_problem: Callable[[torch.device], str | None]) -> Card:
    """Try a device; that something fails is told, not raised."""
    found = accelerator.properties()
    capability, sms = (int(found.major), int(found.minor)), int(found.multi_processor_count)
    problems = []
    if capability < _LEAST_CAPABILITY:
        problems.append(
            "its capability is below 8.0, without bfloat16: give --dtype float16, or a later card"
        )
    try:
        free, total = accelerator.free_bytes(), accelerator.total_bytes()
    except RuntimeError as error:
        problems.append(f"it can't be used: {_line(error)}; nvidia-smi says whether it is full, or lost")
        return Card(str(found.name), capability, sms, 0, 0, "not tried", None, None, tuple(problems))
    if free < total // 2:
        taken, whole = format_size(total - free), format_size(total)
        problems.append(f"{taken} of {whole} are taken; nvidia-smi says by whom: end that, or take another")
    with accelerator.scope():
        trouble = triton_problem(accelerator.device)
        if trouble is not None:
            problems.append(
                f"Triton: {trouble}; without it attention is torch's, and slow: install the triton of this "
                "torch, and a C compiler (gcc)"
            )
        up, down = _rates(accelerator, problems)
    name = str(found.name)
    return Card(name, capability, sms, free, total, trouble or "works", up, down, tuple(problems))


def _rates(accelerator: Accelerator, problems: list[str]) -> tuple[float | None, float | None]:
    try:
        rates = copy_rates(accelerator)
    except (ConfigError, RuntimeError) as error:
        problems.append(f"no copy from pinned memory: {_line(error)}; raise ulimit -l, or end what fills it")
        return None, None
    if min(rates) < LEAST_RATE:
        problems.append(
            f"copies run at {min(rates) / 1e9:.1f} GB/s, so host memory and disk gain little: see that the "
            "card has all its lanes (lspci -vv, LnkSta) and that nothing else copies"
        )
    return rates


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def copy_rates(accelerator: Accelerator) -> tuple[float, float]:
    """Return bytes a second to the device and back, the best of three. Raises ConfigError, RuntimeError."""
    host = host_rows(1, COPIED_BYTES, pin_memory=accelerator.pins_memory)[0]
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=accelerator.device)
    rates = []
    for target, source in ((there, host), (host, there)):
        seconds = []
        for _ in range(3):
            accelerator.synchronize()
            start_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            accelerator.synchronize()
            seconds.append(time.perf_counter() - start_s)
        rates.append(COPIED_BYTES / min(seconds))
    return rates[0], rates[1]
