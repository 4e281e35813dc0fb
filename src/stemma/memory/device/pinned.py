"""Pinned host memory, which a CUDA device copies to and from asynchronously.

torch's `pin_memory` isn't used: its allocator rounds up to a power of two and never returns memory, so an
arena of 40 GB would take 64 GB. Here exactly the requested bytes are locked, and unlocked before they are
freed.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import numpy as np
import torch

from stemma.errors import ConfigError


class HostRegistry(Protocol):
    """The two calls of the CUDA runtime that this needs; 0 means success."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
        """Lock pages."""

    def cudaHostUnregister(self, address: int) -> Any:
        """Unlock them."""


def host_rows(
    num_rows: int, row_bytes: int, *, pin_memory: bool, registry: HostRegistry | None = None
) -> torch.Tensor:
    """Return uint8 [num_rows, row_bytes]; with `pin_memory` its pages stay locked as long as a view lives.

    `registry` replaces the CUDA runtime in tests. Raises ConfigError if the system can't lock more memory.
    """
    # numpy asks for huge pages, torch doesn't.
    array = np.empty((num_rows, row_bytes), dtype=np.uint8)
    if not pin_memory or array.nbytes == 0:
        return torch.from_numpy(array)
    runtime: HostRegistry = registry or torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = array.ctypes.data
    if code := int(runtime.cudaHostRegister(address, array.nbytes, 0)):
        raise ConfigError(
            f"can't pin {array.nbytes} bytes of host memory (CUDA error {code}); "
            "make the host cache smaller or raise the limit of locked memory"
        )
    # The tensor's storage holds the array, views included; its last reference goes before its memory does.
    weakref.finalize(array, runtime.cudaHostUnregister, address)
    return torch.from_numpy(array)
