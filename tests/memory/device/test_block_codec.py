"""Blocks come back equal to the bit, whatever they are; damage is noticed and never read beyond."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory.packed_blocks import BLOCK_BYTES, LAYOUT, codec, noise, numbers

from stemma.config.settings import EngineSettings
from stemma.memory.device.block_codec import choose_codec, expand, make_codec, unpack
from stemma.memory.device.layout import KVLayout
from stemma.native.levels import available_levels

LAYOUTS = [
    LAYOUT,
    replace(LAYOUT, num_kv_heads=1, head_dim=80, num_layers=7),
    replace(LAYOUT, num_kv_heads=3, head_dim=5, num_layers=40),  # rows that no vector divides
    KVLayout(8, 1, 64, 1, 576, "bfloat16", tiled=True),
]


def packed(block: bytes, layout: KVLayout = LAYOUT, isa: str = "auto") -> bytes | None:
    found = codec(layout, isa).pack(memoryview(block))
    return None if found is None else bytes(found)


def unpacked(packed: bytes, num_bytes: int = BLOCK_BYTES) -> bytes | None:
    into = bytearray(num_bytes)
    return bytes(into) if unpack(memoryview(packed), memoryview(into)) else None


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.block_shape))
def test_kv_takes_some_two_thirds_and_comes_back(layout: KVLayout) -> None:
    block = numbers(1, layout)
    found = packed(block, layout)
    assert found is not None
    assert len(found) < 0.75 * len(block)
    assert unpacked(found, len(block)) == block


def test_all_levels_pack_alike() -> None:
    block = numbers(2)
    first, *others = {packed(block, isa=level.name) for level in available_levels()}
    assert first is not None
    assert not others


def test_what_does_not_shrink_stays() -> None:
    assert packed(noise(1)) is None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_numbers_come_back(data: st.DataObject) -> None:
    """Zeros, infinities, NaNs with payloads, subnormals, rows of one value, in any mixture."""
    block = np.frombuffer(numbers(data.draw(st.integers(0, 9))), "<u2").copy()
    special = st.sampled_from([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 1, 0x3F80])
    for _ in range(data.draw(st.integers(0, 6))):
        start, length = data.draw(st.integers(0, len(block) - 1)), data.draw(st.integers(1, 20_000))
        step = data.draw(st.sampled_from([1, 2, 64, 128]))
        block[start : start + length : step] = data.draw(special | st.integers(0, 0xFFFF))
    raw = block.tobytes()
    found = packed(raw)
    assert found is None or unpacked(found) == raw


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_noticed(data: st.DataObject) -> None:
    whole = packed(numbers(3))
    assert whole is not None
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 300) | st.integers(0, len(damaged) - 33))] ^= data.draw(
            st.integers(1, 255)
        )
    cut = data.draw(
        st.sampled_from([len(damaged), 0, 3, 24, 60, len(damaged) - 1]) | st.integers(0, len(damaged))
    )
    found = unpacked(bytes(damaged[:cut]))
    assert found is None or found == numbers(3)


def test_a_block_of_another_size_is_refused() -> None:
    found = packed(numbers(4))
    assert found is not None
    assert unpacked(found, BLOCK_BYTES * 2) is None


def test_a_packed_block_is_unpacked_where_it_lies() -> None:
    block = numbers(5)
    found = packed(block)
    assert found is not None
    buffer = bytearray(found) + bytearray(BLOCK_BYTES - len(found))
    assert expand(memoryview(buffer), len(found))
    assert buffer == block


@pytest.mark.parametrize(
    "layout",
    [
        replace(LAYOUT, dtype="float32"),
        replace(LAYOUT, stored="int8"),
        replace(LAYOUT, block_size=8),  # too small: it takes whole pages
    ],
)
def test_other_blocks_have_no_codec(layout: KVLayout) -> None:
    assert make_codec(layout) is None


def test_the_setting_decides() -> None:
    def chosen(device: str, **changes: object) -> bool:
        settings = EngineSettings.model_validate({"model": {"path": "x"}, **changes})
        return choose_codec(settings, LAYOUT, device) is not None

    assert chosen("cpu")
    assert not chosen("cuda")
    assert chosen("cuda", tiers={"tier_compression": "on"})
    assert not chosen("cpu", tiers={"tier_compression": "off"})
    assert not chosen("cpu", parallel={"tensor_parallel_size": 2})
