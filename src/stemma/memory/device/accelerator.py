"""The one seam to devices: what engine, model and memory ask of one beside the operations on its tensors.

torch has a module for each kind of device (`torch.cuda`, which is also ROCm's, `torch.npu` of torch-npu), all
with the same names. This asks the module, and nothing else does but `model/cuda/`. What a module must have is
in `NEEDED`; docs/explanation/accelerators.md says the rest.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from typing_extensions import override

from stemma.errors import ConfigError, DeviceLost
from stemma.native.process_memory import available_bytes, peak_bytes, reset_peak, resident_bytes

CUDA = "cuda"
"""The kind whose kernels, graphs and pinned memory are ours; ROCm's has this name too."""
NEEDED = [
    "Event",
    "Stream",
    "current_stream",
    "device",
    "empty_cache",
    "get_device_properties",
    "is_available",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "reset_peak_memory_stats",
    "stream",
    "synchronize",
]
"""Names that torch's module for a kind of device must have."""


class Accelerator:
    """What a device offers. This one is the host, where all work is over when a call returns."""

    is_host = True
    pins_memory = False
    """Whether copies between pinned memory of the host and the device run beside the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def scope(self) -> AbstractContextManager[Any]:
        """Return what makes the device this thread's current one, for all that launches work."""
        return nullcontext()

    def stream(self) -> Any:
        """Return a new stream, beside that of steps; None on the host."""
        return None

    def queued_in(self, stream: Any) -> AbstractContextManager[Any]:
        """Return what queues this thread's work in `stream`, on its device."""
        return nullcontext()

    def marked(self) -> Any:
        """Return an event behind all that this thread's stream has queued; None on the host."""
        return None

    def run_after(self, event: Any) -> None:
        """Let what this thread's stream gets from now on wait for the event, on the device."""

    def synchronize(self) -> None:
        """Wait for what this thread's stream has queued."""

    def require_alive(self, error: Exception) -> None:
        """Raise DeviceLost if it was the device itself that failed: nothing works on it any more."""

    def free_bytes(self) -> int:
        """Return how many bytes can still be allocated, within the container's limit."""
        return available_bytes()

    def total_bytes(self) -> int:
        """Return the whole memory."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def held_bytes(self) -> int:
        """Return what this process holds."""
        return resident_bytes()

    def reset_peak(self) -> None:
        """Measure `peak_bytes` from here."""
        reset_peak()

    def peak_bytes(self) -> int:
        """Return the most that this process held since `reset_peak`."""
        return peak_bytes()

    def properties(self) -> Any:
        """Return what torch says of the device: its name, and of CUDA's also `major`, `minor` and more."""
        return None

    def numeric_path(self) -> str:
        """Return what the bits of products depend on beside torch: the kind of device and its size."""
        return self.device.type


class _Beside(Accelerator):
    """A device that computes beside the host, through torch's module for its kind."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pins_memory = device.type == CUDA
        self._module: Any = torch.get_device_module(device)

    @override
    def scope(self) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = self._module.device(self.device)
        return scope

    @override
    def stream(self) -> Any:
        with self.scope():
            return self._module.Stream(self.device)

    @override
    def queued_in(self, stream: Any) -> AbstractContextManager[Any]:
        inside: AbstractContextManager[Any] = self._module.stream(stream)  # makes its device current too
        return inside

    @override
    def marked(self) -> Any:
        event = self._module.Event()
        event.record(self._module.current_stream(self.device))
        return event

    @override
    def run_after(self, event: Any) -> None:
        self._module.current_stream(self.device).wait_event(event)

    @override
    def synchronize(self) -> None:
        self._module.current_stream(self.device).synchronize()

    @override
    def require_alive(self, error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            return
        try:
            self._module.synchronize(self.device)
        except RuntimeError as again:
            # A context that is destroyed answers each call so; one failed launch is told once.
            raise DeviceLost(f"device {self.device} is lost: {str(again).partition(chr(10))[0]}") from error

    @override
    def free_bytes(self) -> int:
        self._module.empty_cache()  # what torch keeps for later is free
        return int(self._module.mem_get_info(self.device)[0])

    @override
    def total_bytes(self) -> int:
        return int(self._module.mem_get_info(self.device)[1])

    @override
    def held_bytes(self) -> int:
        return int(self._module.memory_allocated(self.device))

    @override
    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.device)

    @override
    def peak_bytes(self) -> int:
        self.synchronize()
        return int(self._module.max_memory_allocated(self.device))

    @override
    def properties(self) -> Any:
        return self._module.get_device_properties(self.device)

    @override
    def numeric_path(self) -> str:
        """Libraries choose their products by the device's generation and by its number of multiprocessors."""
        properties = self.properties()
        names = ("major", "minor", "multi_processor_count") if self.device.type == CUDA else ("name",)
        size = (str(getattr(properties, name, "")).replace(" ", "_") for name in names)
        return "-".join((self.device.type, *size))


@lru_cache(maxsize=64)
def accelerator_of(device: torch.device) -> Accelerator:
    """Return what a device offers."""
    return Accelerator(device) if device.type == "cpu" else _Beside(device)


def resolve_device(name: str) -> torch.device:
    """Turn a setting into a device; `auto` is CUDA if there is one, else CPU. Raises ConfigError."""
    if name == "auto":
        return torch.device(CUDA if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}; use auto, cpu or cuda") from error
    if device.type == "cpu":
        return device
    try:
        module: Any = torch.get_device_module(device)
    except RuntimeError as error:
        raise ConfigError(f"device {name}: torch has no module for it; use cpu") from error
    if missing := [one for one in NEEDED if not hasattr(module, one)]:
        raise ConfigError(f"device {name}: torch's module for it has no {', '.join(missing)}; use cpu")
    if not module.is_available():
        raise ConfigError(f"device is {name}, but torch finds no such device; use cpu")
    count = module.device_count() if hasattr(module, "device_count") else 1
    if device.index is not None and device.index >= count:
        raise ConfigError(f"device is {name}, but torch finds {count}, counted from 0; choose another")
    return device
