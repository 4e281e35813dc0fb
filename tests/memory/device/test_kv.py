"""The device tier: one contiguous run of bytes a block."""

from __future__ import annotations

import pytest
import torch

from stemma.errors import ConfigError
from stemma.memory.device.kv import DeviceKV, num_blocks_for
from stemma.memory.device.layout import KVLayout

LAYOUT = KVLayout(num_layers=3, num_parts=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")


def test_a_block_is_one_run_of_bytes() -> None:
    kv = DeviceKV(LAYOUT, num_blocks=5)
    assert LAYOUT.block_bytes == 3 * 2 * 4 * 2 * 8 * 2
    kv.layer(1)[3, 0, 2, 1] = torch.arange(8, dtype=torch.bfloat16)
    view = kv.block_bytes_view(3)
    assert (view.shape, view.dtype, view.is_contiguous()) == ((LAYOUT.block_bytes,), torch.uint8, True)
    assert kv.data[3].flatten().view(torch.uint8).equal(view)
    kv.block_bytes_view(4).copy_(view)
    assert kv.data[4].equal(kv.data[3])
    assert kv.capacity_bytes == 5 * LAYOUT.block_bytes


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_copy_block_head(num_tokens: int) -> None:
    kv = DeviceKV(LAYOUT, num_blocks=3)
    kv.data.copy_(torch.randn(kv.data.shape))
    before = kv.data.clone()
    kv.copy_block_head(2, 0, num_tokens)
    assert kv.data[0, :, :, :num_tokens].equal(before[2, :, :, :num_tokens])
    assert kv.data[0, :, :, num_tokens:].equal(before[0, :, :, num_tokens:])
    assert kv.data[1:].equal(before[1:])


def test_sizing() -> None:
    assert num_blocks_for(LAYOUT, 10 * LAYOUT.block_bytes + 1) == 10
    with pytest.raises(ConfigError, match="one block of 4 tokens"):
        num_blocks_for(LAYOUT, LAYOUT.block_bytes - 1)
    with pytest.raises(ConfigError):
        DeviceKV(LAYOUT, num_blocks=0)
