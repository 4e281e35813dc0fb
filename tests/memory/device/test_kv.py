"""The device tier: one contiguous run of bytes a block."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from stemma.errors import ConfigError
from stemma.memory.device.kv import DeviceKV, num_blocks_for
from stemma.memory.device.layout import KVLayout, StoredAs
from stemma.model.attend.kv_format import KVRows

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


def test_touching_a_block_leaves_the_others() -> None:
    kv = DeviceKV(LAYOUT, num_blocks=3)
    kv.data[0] = kv.data[2] = 1.0
    kv.touch(1)
    assert kv.data[0].eq(1).all()
    assert kv.data[1].eq(0).all()
    assert kv.data[2].eq(1).all()


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_codes_are_copied_with_their_scales(num_parts: int, num_tokens: int) -> None:
    layout = replace(LAYOUT, num_parts=num_parts, num_kv_heads=3, head_dim=13, stored="int8")
    kv = DeviceKV(layout, num_blocks=3)
    generator = torch.Generator().manual_seed(0)
    parts = [KVRows(kv, 2, part, 13) for part in range(num_parts)]
    blocks, offsets = torch.arange(3).repeat_interleave(4), torch.arange(4).repeat(3)
    for rows in parts:
        rows.write(blocks, offsets, torch.randn(12, 3, 13, generator=generator) * 100)
    before = [rows.gather(torch.arange(3)) for rows in parts]
    kv.copy_block_head(2, 0, num_tokens)
    for rows, old in zip(parts, before, strict=True):
        after = rows.gather(torch.arange(3))
        assert after[0, :num_tokens].equal(old[2, :num_tokens])
        assert after[0, num_tokens:].equal(old[0, num_tokens:])
        assert after[1:].equal(old[1:])


@pytest.mark.parametrize("stored", get_args(StoredAs))
@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_copy_block_head_of_pieces(stored: StoredAs, num_tokens: int) -> None:
    layout = KVLayout(3, 1, 4, 1, 40, "bfloat16", stored, 32, tiled=True)
    kv = DeviceKV(layout, num_blocks=3)
    rows = KVRows(kv, 2, 0, 40)
    blocks, offsets = torch.arange(3).repeat_interleave(4), torch.arange(4).repeat(3)
    rows.write(blocks, offsets, torch.randn(12, 1, 40, generator=torch.Generator().manual_seed(0)).bfloat16())
    before = rows.gather(torch.arange(3))
    kv.copy_block_head(2, 0, num_tokens)
    after = rows.gather(torch.arange(3))
    assert after[0, :num_tokens].equal(before[2, :num_tokens])
    assert after[0, num_tokens:].equal(before[0, num_tokens:])
    assert after[1:].equal(before[1:])


def test_a_tiled_block() -> None:
    """[columns / 16, token, 16], filled up to whole pieces; of codes, bytes with their scales."""
    layout = KVLayout(2, 1, 8, 1, 40, "bfloat16", latent_rank=32, tiled=True)
    kv = DeviceKV(layout, num_blocks=2)
    assert kv.data.shape == (2, 2, 1, 3, 8, 16)
    assert layout.row_bytes == 48 * 2
    assert (kv.token_stride, layout.column_stride) == (16, 8 * 16)
    row = torch.arange(40, dtype=torch.bfloat16)
    KVRows(kv, 1, 0, 40).write(torch.tensor([1]), torch.tensor([5]), row.view(1, 1, 40))
    assert kv.data[1, 1, 0, :, 5].flatten()[:40].equal(row)
    deepseek = KVLayout(61, 1, 128, 1, 576, "bfloat16", latent_rank=512)
    assert replace(deepseek, tiled=True).block_bytes == deepseek.block_bytes
    assert replace(deepseek, stored="int8", tiled=True).row_bytes == 592


def test_bytes_of_codes() -> None:
    """A scale of two bytes for each token and KV head, two for a latent."""
    dense = KVLayout(30, 2, 16, 3, 64, "bfloat16")
    coded = replace(dense, stored="int8")
    assert coded.bytes_per_token == 30 * 2 * 3 * (64 + 2)
    assert dense.bytes_per_token / coded.bytes_per_token > 1.93
    latent = KVLayout(61, 1, 128, 1, 576, "bfloat16")
    assert replace(latent, stored="fp8", latent_rank=512).bytes_per_token == 61 * (576 + 4)
    assert replace(latent, head_dim=575, stored="fp8", latent_rank=512).row_bytes == 576 + 4
    kv = DeviceKV(coded, num_blocks=2)
    assert kv.data.shape == (2, 30, 2, 16, 3 * 66)
    assert len(kv.block_bytes_view(1)) == coded.block_bytes


def test_layouts_that_differ_are_described_differently() -> None:
    layouts = [replace(LAYOUT, stored=stored) for stored in get_args(StoredAs)]
    layouts += [replace(layout, dtype="float32") for layout in layouts]
    layouts.append(replace(LAYOUT, stored="int8", latent_rank=4))
    layouts += [replace(layout, tiled=True) for layout in layouts]
    assert len({layout.describe() for layout in layouts}) == len(layouts)
    assert LAYOUT.describe() == "layer,part,token,head,dim:3x2x4x2x8:bfloat16"


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
