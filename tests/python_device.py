"""A kind of device in Python alone: torch's PrivateUse1, renamed, whose tensors lie in host memory.

Each operation on its tensors is a launch, which `LAUNCHES` counts by (device, device that was current). Its
module has what `memory/device/accelerator.py` asks of one, and notes streams, events and waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch.utils._pytree import tree_map

NAME = "pseudo"
NUM_DEVICES = 2
TOTAL_BYTES = 8 << 30
LAUNCHES: Counter[tuple[int, int]] = Counter()
"""By (index of the tensors, index that was current on the thread)."""
OPERATIONS: Counter[str] = Counter()
"""By name."""
USES: Counter[str] = Counter()
"""Streams, events and waits, by name."""
SLOW_S = 0.02
"""How long the host waits for an event: steps that are ordered behind it run before."""
_current = threading.local()


def current_device() -> int:
    return int(getattr(_current, "index", 0))


class DeviceTensor(torch.Tensor):
    """A tensor of the device, over one of the host."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, index: int) -> DeviceTensor:
        with torch.inference_mode(False):  # a view of one made elsewhere counts its versions
            made: Any = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=torch.device(NAME, index),
            )
        made.host = host
        return made

    def __init__(self, host: torch.Tensor, index: int) -> None:
        pass

    def tolist(self) -> Any:
        """As torch's, which knows no subclasses."""
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return launch(func, args, kwargs or {})


def launch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host's tensors; wrap what it returns, unless it is a copy to the host."""
    found: list[DeviceTensor] = []

    def opened(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            found.append(value)
            return value.host
        return value

    inner, named = tree_map(opened, args), tree_map(opened, kwargs)
    stream = getattr(_current, "stream", None)
    if stream is not None and func is torch.ops.aten.copy_.default:
        OPERATIONS[str(func)] += 1
        stream.queued.append(partial(_copy, *inner[:2]))
        return args[0]
    wanted = named.get("device")
    index = found[0].device.index if found else wanted.index or 0
    goes_down = wanted is not None and wanted.type == "cpu"
    if wanted is not None:
        named["device"] = torch.device("cpu")
    named.pop("pin_memory", None)
    LAUNCHES[index, current_device()] += 1
    OPERATIONS[str(func)] += 1
    if func is torch.ops.aten.histc.default:
        inner = (inner[0].float(), *inner[1:])  # the host counts no integers
    result = func(*inner, **named)
    if goes_down:
        return result.clone() if any(result is one.host for one in found) else result
    known = {id(one.host): one for one in found}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else DeviceTensor(value, index)

    return tree_map(wrapped, result)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode(), torch._C._DisableTorchDispatch():  # noqa: SLF001
        target.copy_(source)


class _Stream:
    """What is queued in it runs when somebody waits for it: as late as a real device may run it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queued: list[Any] = []
        self._lock = threading.RLock()
        USES["streams"] += 1

    def run(self, up_to: int) -> None:
        """Run what was queued up to a place, in order."""
        with self._lock:
            for place in range(up_to):
                work, self.queued[place] = self.queued[place], None
                if work is not None:
                    work()

    def synchronize(self) -> None:
        USES["waits"] += 1
        self.run(len(self.queued))

    def wait_event(self, event: _Event) -> None:
        USES["steps behind events"] += 1
        event.run()


class _Event:
    def record(self, stream: _Stream) -> None:
        USES["events"] += 1
        self._stream, self._place = stream, len(stream.queued)

    def run(self) -> None:
        self._stream.run(self._place)

    def synchronize(self) -> None:
        USES["waits for events"] += 1
        time.sleep(SLOW_S)
        self.run()


@contextmanager
def _queueing(stream: _Stream) -> Any:
    before, _current.stream = getattr(_current, "stream", None), stream
    try:
        with _device(stream.device):
            yield
    finally:
        _current.stream = before


@contextmanager
def _device(device: torch.device) -> Any:
    before = current_device()
    _current.index = device.index or 0
    try:
        yield
    finally:
        _current.index = before


def _module() -> ModuleType:
    module: Any = ModuleType(f"torch.{NAME}")
    module.Stream, module.Event, module.device = _Stream, _Event, _device
    module.current_device, module.device_count = current_device, lambda: NUM_DEVICES
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False  # noqa: SLF001
    module.manual_seed_all = lambda _seed: None
    module.current_stream = lambda device: getattr(_current, "stream", None) or _Stream(device)
    module.stream = _queueing
    module.synchronize = lambda _device: None
    module.get_device_properties = lambda _device: SimpleNamespace(name="Pseudo 9")
    module.empty_cache = lambda: None
    module.mem_get_info = lambda _device: (TOTAL_BYTES * 3 // 4, TOTAL_BYTES)
    module.memory_allocated = lambda _device: 1 << 30
    module.reset_peak_memory_stats = lambda _device: None
    module.max_memory_allocated = lambda _device: (1 << 30) + (1 << 28)
    return module


@contextmanager
def registered() -> Iterator[None]:
    """Let torch know the device. It knows it to the end of the process; modules are moved to it in here."""
    if not _KEPT:
        registration._setup_privateuseone_for_python_backend(NAME, _module())  # noqa: SLF001
        library = torch.library.Library("aten", "IMPL")
        for name in ("empty.memory_format", "empty_strided"):
            library.impl(name, _factory(name), "PrivateUse1")
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        _KEPT.append(library)
    # So modules that are moved get parameters that are such tensors, not shells of the host's.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


_KEPT: list[Any] = []


def _factory(name: str) -> Any:
    base, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, base), overload or "default")

    def make(*args: Any, **kwargs: Any) -> Any:
        return launch(func, args, kwargs)

    return make


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    """Where torch copies by itself, as `torch.tensor` does."""
    return launch(torch.ops.aten.copy_.default, (target, source, non_blocking), {})
