"""Codes as files pack them, taken apart by the kernels and without them, and packed straight from there."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stemma.model.cpu.codes import PackedCodes
from stemma.model.weights import fields
from stemma.model.weights.fields import Field, PackedFields, bytes_of, fields_of_words
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from stemma.native.library import Kernels, load_kernels


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Kernels:
    found = load_kernels()
    assert found is not None
    return found


@st.composite
def codes(draw: st.DrawFn) -> PackedFields:
    """Any fields: 32 or more of a block, some with bits above them, behind and before other bytes."""
    bits, width = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 16, 32, 64]))
    num_bytes = width * draw(st.integers(1, 3)) * (4 if width == 1 else 1)
    at = draw(st.integers(0, 5))
    low, high, end = Field(at, num_bytes, bits, width), None, at + num_bytes
    above = [one for one in (1, 2, 4) if bits + one <= 8 and low.count * one % 8 == 0]
    one = draw(st.sampled_from([0, *above]))
    if one:
        size = low.count * one // 8
        high = Field(end, size, one, draw(st.sampled_from([w for w in (1, 16, 32, 64) if size % w == 0])))
        end += size
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 4)), end + draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return PackedFields(blocks, low, high, draw(st.integers(-128, 100)))


def one_by_one(packed: PackedFields) -> torch.Tensor:
    """Each code by its definition."""

    def field(block: torch.Tensor, of: Field, number: int) -> int:
        run, within = divmod(number, of.width * 8 // of.bits)
        shift, byte = divmod(within, of.width)
        return int(block[of.at + run * of.width + byte]) >> shift * of.bits & ((1 << of.bits) - 1)

    found = []
    for block in packed.blocks.flatten(0, 1):
        for number in range(packed.low.count):
            code = field(block, packed.low, number)
            if packed.high is not None:
                code |= field(block, packed.high, number) << packed.low.bits
            found.append((code + packed.added + 128) % 256 - 128)
    return torch.tensor(found, dtype=torch.int8).view(packed.shape)


@given(packed=codes())
def test_codes_are_those_of_their_definition(packed: PackedFields) -> None:
    expected = one_by_one(packed)
    assert torch.equal(packed.apart(), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields, "loaded_kernels", lambda: None)
        assert torch.equal(packed.apart(), expected)
    rows = torch.arange(packed.shape[0]).flip(0)
    assert torch.equal(bytes_of(packed.of_rows(rows)), expected[rows])


def packed_bytes(kernels: Kernels, weight: QuantizedWeight) -> torch.Tensor:
    packed = PackedCodes(kernels, [weight], None)
    return packed.room[: kernels.packed_bytes(ctypes.addressof(packed.strips), False)].clone()


@pytest.mark.parametrize("group", [16, 32, 64, 96, 192])
@pytest.mark.parametrize("block", ["words", "runs", "above"])
def test_they_are_packed_as_a_byte_each_would_be(kernels: Kernels, block: str, group: int) -> None:
    """Blocks of which a group holds several, of which one holds several groups, and neither."""
    rows, inputs = 70, 192
    generator = torch.Generator().manual_seed(group)
    if block == "words":
        words = torch.randint(
            -(2**31), 2**31 - 1, (rows, inputs // 8), dtype=torch.int32, generator=generator
        )
        packed, bits = fields_of_words(words, 4), 4
    elif block == "runs":
        blocks = torch.randint(0, 256, (rows, inputs // 64, 34), dtype=torch.uint8, generator=generator)
        packed, bits = PackedFields(blocks, Field(2, 32, 4, 16), added=-8), 4
    else:
        blocks = torch.randint(0, 256, (rows, inputs // 32, 26), dtype=torch.uint8, generator=generator)
        packed, bits = PackedFields(blocks, Field(0, 16, 4, 16), Field(18, 8, 2, 1), added=-32), 6
    scales = torch.ones(rows, inputs // group)
    apart, kept = (
        QuantizedWeight(each, scales, None, bits, group, ActivationScheme.NONE)
        for each in (packed.apart(), packed)
    )
    assert torch.equal(packed_bytes(kernels, kept), packed_bytes(kernels, apart))
    assert torch.equal(kept.dequantize(torch.float32), apart.dequantize(torch.float32))
