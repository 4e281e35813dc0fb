"""The machine: versions, processor, threads, memory, GPU."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from stemma.cli.doctor.card import Card, examine_card
from stemma.memory.device.accelerator import CUDA, accelerator_of
from stemma.native.cores import affinity_cores, quota_cores
from stemma.native.process_memory import resident_bytes

_PACKAGES = (
    "stemma-llm",
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "fastapi",
    "uvicorn",
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY", "LD_PRELOAD")
CUDA_STATE = "the CUDA path has run twice, on an H100: small models, no ranks"


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor and how much of it this process may use."""

    name: str
    architecture: str
    num_cores: int
    """Logical cores of the machine."""
    num_usable_cores: int
    """Those that this process may run on."""
    quota_cores: float | None
    """The container's limit (cgroup v2); None: no limit."""


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads of the step loop."""

    num_threads: int
    origin: str
    environment: dict[str, str]
    """Variables that are set and change how threads run."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine."""

    total_bytes: int
    free_bytes: int
    """Bytes that can still be allocated, within the container's limit."""
    resident_bytes: int | None
    """Bytes that this process holds after importing torch; None where the system doesn't say."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPUs that torch finds."""

    names: tuple[str, ...]
    cuda_version: str | None
    """That torch was built for; None: torch has no CUDA."""
    state: str = CUDA_STATE
    cards: tuple[Card, ...] = ()


def versions() -> dict[str, str]:
    """Return the versions of Python, the system and the packages that matter."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def processor() -> Processor:
    """Return what the system says about its processor."""
    return Processor(
        _processor_name(), platform.machine(), os.cpu_count() or 1, affinity_cores(), quota_cores()
    )


def threads(wanted: int | None) -> Threads:
    """Return the number of threads that the step loop will use; `wanted` is the setting."""
    environment = {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}
    if wanted is not None:
        return Threads(wanted, "the setting num_threads", environment)
    return Threads(torch.get_num_threads(), "torch's default", environment)


def memory() -> Memory:
    """Return the memory of the machine and of this process."""
    host = accelerator_of(torch.device("cpu"))
    try:
        resident = resident_bytes()
    except OSError:
        resident = None
    return Memory(host.total_bytes(), host.free_bytes(), resident)


def gpu() -> Gpu:
    """Return the GPUs that torch can use, each tried."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [accelerator_of(torch.device(CUDA, number)) for number in range(count)]
    if not devices:
        return Gpu((), torch.version.cuda)
    from stemma.model.cuda.execution import triton_problem

    cards = tuple(examine_card(device, triton_problem) for device in devices)
    return Gpu(tuple(card.name for card in cards), torch.version.cuda, cards=cards)


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
