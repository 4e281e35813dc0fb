"""How many blocks a budget gives, and what counts as free memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stemma.config.settings import CacheSettings
from stemma.errors import ConfigError
from stemma.memory.device import sizing
from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, StateLayout, StatePart, WindowGroup

LAYOUT = KVLayout(2, 2, 16, 2, 8, "float32")
STATE = StateLayout((StatePart(0, "recurrent", (2, 8, 8)),))
CPU = torch.device("cpu")


def test_a_budget_in_bytes_is_never_exceeded() -> None:
    settings = CacheSettings(kv_cache_memory=10 * LAYOUT.block_bytes + 1)
    num_bytes = sizing.device_bytes(settings, CPU)
    assert sizing.device_sizes(LAYOUT, num_bytes, 8) == sizing.DeviceSizes(10)


def test_a_fraction_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_of(CPU), "free_bytes", lambda: 100 * LAYOUT.block_bytes)
    assert sizing.device_bytes(CacheSettings(), CPU) == 50 * LAYOUT.block_bytes
    assert sizing.device_bytes(CacheSettings(kv_cache_fraction=0.25), CPU) == 25 * LAYOUT.block_bytes


def test_states_lie_among_the_blocks() -> None:
    layout = replace(LAYOUT, state=STATE)
    num_bytes = 400 * layout.block_bytes
    sizes = sizing.device_sizes(layout, num_bytes, 8)
    assert 400 - sizes.slab < sizes.num_blocks <= 400
    assert sizes.num_reserved == 3 * layout.blocks_per_state
    kv = DeviceKV(layout, sizes.num_blocks, slab=sizes.slab)
    assert kv.num_states == sizes.num_blocks // layout.blocks_per_state
    last = kv.num_states - 1
    assert kv.state_address(last) % 4 == 0
    assert kv.state_blocks(last).stop == sizes.num_blocks
    kv.state_part(last, 0, STATE.parts[0].shape).fill_(1.0)
    kv.clear_slab(last)
    assert float(kv.data.abs().sum()) == 0.0


def test_pages_lie_among_the_blocks_and_are_enough_for_a_step() -> None:
    layout = replace(LAYOUT, windows=WindowGroup((0, 2, 3), 40, 2, 8))
    assert layout.page.num_layers == 3
    assert [layout.place_of(number) for number in range(5)] == [
        *((True, 0), (False, 0), (True, 1), (True, 2), (False, 1))
    ]
    num_bytes = 400 * layout.block_bytes
    sizes = sizing.device_sizes(layout, num_bytes, 64)
    assert sizes.num_reserved >= 8 * layout.blocks_per_page
    assert sizes.num_blocks * layout.block_bytes <= num_bytes
    kv = DeviceKV(layout, sizes.num_blocks, slab=sizes.slab)
    assert kv.pages is not None
    kv.pages.data[-1] = 1.0
    last = kv.page_blocks(kv.num_pages - 1)
    assert float(kv.block_bytes_view(last.start).view(torch.float32)[0]) == 1.0
    assert float(kv.data[: last.start].abs().sum()) == 0.0


WINDOWED = replace(LAYOUT, windows=WindowGroup((0,), 40, 2, 8))


@pytest.mark.parametrize(
    "layout", [LAYOUT, replace(LAYOUT, state=STATE), WINDOWED], ids=["kv", "states", "windows"]
)
def test_less_than_a_block_is_an_error(layout: KVLayout) -> None:
    with pytest.raises(ConfigError):
        sizing.device_sizes(layout, 1, 8)


def test_free_memory_is_something():
    assert 0 < accelerator_of(CPU).free_bytes() <= accelerator_of(CPU).total_bytes() < 2**50
