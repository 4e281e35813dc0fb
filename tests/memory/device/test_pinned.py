"""Locking and unlocking of host memory, with a stand-in for the CUDA runtime; once with the real one."""

from __future__ import annotations

import gc

import pytest
import torch

from stemma.errors import ConfigError
from stemma.memory.device.pinned import HostRegistry, host_rows


class FakeRuntime(HostRegistry):
    def __init__(self, code: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self._code = code

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self._code == 0:
            self.locked[address] = num_bytes
        return self._code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_locks_exactly_what_it_gives() -> None:
    runtime = FakeRuntime()
    rows = host_rows(3, 1000, pin_memory=True, registry=runtime)
    assert runtime.locked == {rows.data_ptr(): 3000}
    assert (rows.shape, rows.dtype) == ((3, 1000), torch.uint8)


def test_stays_locked_while_a_view_lives() -> None:
    """A copy may still run from a borrowed row when its store has closed."""
    runtime = FakeRuntime()
    rows = host_rows(3, 1000, pin_memory=True, registry=runtime)
    row = rows[1]
    del rows
    gc.collect()
    assert runtime.locked
    del row
    gc.collect()
    assert not runtime.locked


def test_no_lock_without_a_device() -> None:
    runtime = FakeRuntime()
    assert host_rows(2, 10, pin_memory=False, registry=runtime).shape == (2, 10)
    assert host_rows(0, 10, pin_memory=True, registry=runtime).shape == (0, 10)
    assert not runtime.locked


def test_refusal_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"can't pin 30 bytes .*CUDA error 2.*smaller"):
        host_rows(3, 10, pin_memory=True, registry=FakeRuntime(code=2))


@pytest.mark.cuda
def test_torch_takes_it_for_pinned() -> None:
    """Copies from it run without stopping the caller, and arrive whole."""
    rows = host_rows(64, 1 << 16, pin_memory=True)
    rows.random_(0, 256)
    assert rows.is_pinned()
    assert rows[5].is_pinned()
    there = rows.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), rows)
