"""How many blocks a budget gives, and what counts as free memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stemma.config.settings import CacheSettings
from stemma.errors import ConfigError
from stemma.memory.device import sizing
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, StateLayout, StatePart, WindowGroup

LAYOUT = KVLayout(2, 2, 16, 2, 8, "float32")
STATE = StateLayout((StatePart(0, "recurrent", (2, 8, 8)),))
CPU = torch.device("cpu")


def test_a_budget_in_bytes_is_never_exceeded() -> None:
    settings = CacheSettings(kv_cache_memory=10 * LAYOUT.block_bytes + 1)
    num_bytes = sizing.device_bytes(settings, CPU)
    assert sizing.device_sizes(LAYOUT, num_bytes, settings, 8) == sizing.DeviceSizes(10)


def test_a_fraction_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda _device: 100 * LAYOUT.block_bytes)
    assert sizing.device_bytes(CacheSettings(kv_cache_fraction=0.25), CPU) == 25 * LAYOUT.block_bytes


def test_states_take_their_share() -> None:
    layout = replace(LAYOUT, state=STATE)
    settings = CacheSettings(state_cache_fraction=0.25)
    num_bytes = 400 * layout.block_bytes
    sizes = sizing.device_sizes(layout, num_bytes, settings, 8)
    num_blocks, num_states = sizes.num_blocks, sizes.num_states
    assert num_states == 100 // layout.blocks_per_state
    assert layout.aligned(num_blocks) == num_blocks
    assert num_bytes >= (num_blocks + num_states * layout.blocks_per_state) * layout.block_bytes
    kv = DeviceKV(layout, num_blocks, num_states=num_states)
    assert kv.state_address(num_states - 1) % 4 == 0
    kv.state_part(num_states - 1, 0, STATE.parts[0].shape).fill_(1.0)


def test_pages_are_fewer_than_blocks_and_enough_for_a_step() -> None:
    layout = replace(LAYOUT, windows=WindowGroup((0, 2, 3), 40, 2, 8))
    assert layout.page.num_layers == 3
    assert [layout.place_of(number) for number in range(5)] == [
        *((True, 0), (False, 0), (True, 1), (True, 2), (False, 1))
    ]
    num_bytes = 400 * layout.block_bytes
    sizes = sizing.device_sizes(layout, num_bytes, CacheSettings(), 64)
    assert 8 <= sizes.num_pages < sizes.num_blocks
    total = sizes.num_blocks + sizes.num_pages * layout.blocks_per_page
    assert total * layout.block_bytes <= num_bytes
    kv = DeviceKV(layout, sizes.num_blocks, num_pages=sizes.num_pages)
    assert kv.pages is not None
    kv.pages.data[-1] = 1.0
    assert float(kv.block_bytes_view(kv.page_blocks(sizes.num_pages - 1).start).view(torch.float32)[0]) == 1.0
    assert float(kv.data[: sizes.num_blocks].abs().sum()) == 0.0


WINDOWED = replace(LAYOUT, windows=WindowGroup((0,), 40, 2, 8))


@pytest.mark.parametrize(
    "layout", [LAYOUT, replace(LAYOUT, state=STATE), WINDOWED], ids=["kv", "states", "windows"]
)
def test_less_than_a_block_is_an_error(layout: KVLayout) -> None:
    with pytest.raises(ConfigError):
        sizing.device_sizes(layout, 1, CacheSettings(), 8)


def test_free_memory_is_something():
    assert 0 < sizing.free_bytes(CPU) < 2**50
