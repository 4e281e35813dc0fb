"""How many blocks a budget gives, and what counts as free memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stemma.config.settings import CacheSettings
from stemma.errors import ConfigError
from stemma.memory.device import sizing
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, StateLayout, StatePart

LAYOUT = KVLayout(2, 2, 16, 2, 8, "float32")
STATE = StateLayout((StatePart(0, "recurrent", (2, 8, 8)),))
CPU = torch.device("cpu")


def test_a_budget_in_bytes_is_never_exceeded() -> None:
    settings = CacheSettings(kv_cache_memory=10 * LAYOUT.block_bytes + 1)
    num_bytes = sizing.device_bytes(settings, CPU)
    assert sizing.blocks_and_states(LAYOUT, num_bytes, settings) == (10, 0)


def test_a_fraction_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda _device: 100 * LAYOUT.block_bytes)
    assert sizing.device_bytes(CacheSettings(kv_cache_fraction=0.25), CPU) == 25 * LAYOUT.block_bytes


def test_states_take_their_share() -> None:
    layout = replace(LAYOUT, state=STATE)
    settings = CacheSettings(state_cache_fraction=0.25)
    num_bytes = 400 * layout.block_bytes
    num_blocks, num_states = sizing.blocks_and_states(layout, num_bytes, settings)
    assert num_states == 100 // layout.blocks_per_state
    assert layout.aligned(num_blocks) == num_blocks
    assert num_bytes >= (num_blocks + num_states * layout.blocks_per_state) * layout.block_bytes
    kv = DeviceKV(layout, num_blocks, num_states=num_states)
    assert kv.state_address(num_states - 1) % 4 == 0
    kv.state_part(num_states - 1, 0, STATE.parts[0].shape).fill_(1.0)


@pytest.mark.parametrize("layout", [LAYOUT, replace(LAYOUT, state=STATE)], ids=["kv", "states"])
def test_less_than_a_block_is_an_error(layout: KVLayout) -> None:
    with pytest.raises(ConfigError):
        sizing.blocks_and_states(layout, 1, CacheSettings())


def test_free_memory_is_something():
    assert 0 < sizing.free_bytes(CPU) < 2**50
