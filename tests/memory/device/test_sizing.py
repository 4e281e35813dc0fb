"""How many blocks a budget gives, and what counts as free memory."""

from __future__ import annotations

import pytest
import torch

from stemma.config.settings import CacheSettings
from stemma.errors import ConfigError
from stemma.memory.device import sizing
from stemma.memory.device.layout import KVLayout

LAYOUT = KVLayout(2, 2, 16, 2, 8, "float32")
CPU = torch.device("cpu")


def test_a_budget_in_bytes_is_never_exceeded():
    settings = CacheSettings(kv_cache_memory=10 * LAYOUT.block_bytes + 1)
    assert sizing.num_device_blocks(settings, LAYOUT, CPU) == 10


def test_a_fraction_of_free_memory(monkeypatch):
    monkeypatch.setattr(sizing, "free_bytes", lambda _device: 100 * LAYOUT.block_bytes)
    assert sizing.num_device_blocks(CacheSettings(kv_cache_fraction=0.25), LAYOUT, CPU) == 25


def test_less_than_a_block_is_an_error():
    with pytest.raises(ConfigError):
        sizing.num_device_blocks(CacheSettings(kv_cache_memory=1), LAYOUT, CPU)


def test_free_memory_is_something():
    assert 0 < sizing.free_bytes(CPU) < 2**50
