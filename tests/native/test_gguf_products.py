"""Products with GGUF's block formats, against what the package gguf makes of the same bytes."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from stemma.model.cpu.weights import PackedProduct
from stemma.model.formats.gguf.tensors import is_kept, split
from stemma.model.weights.joining import alike
from stemma.model.weights.quantized import QuantizedWeight
from stemma.model.weights.rounding import RoundInputs
from stemma.native.library import Kernels, load_kernels
from tests import gguf_files
from tests.native.isa import level_params

OUTPUTS, INPUTS = 150, 1024
KINDS = [kind for kind in Kind if is_kept(kind)]
BITS_READ = {
    Kind.Q4_0: 4.5,
    Kind.Q4_1: 5.0,
    Kind.Q5_0: 5.5,
    Kind.Q5_1: 6.0,
    Kind.Q8_0: 8.5,
    Kind.Q4_K: 4.625,
    Kind.Q5_K: 5.625,
    Kind.Q6_K: 6.5625,
    Kind.Q3_K: 4.5625,
    Kind.Q2_K: 5.125,
    Kind.IQ4_NL: 4.5,
    Kind.IQ4_XS: 4.3125,
}
"""Of memory for a weight, scales included."""


@pytest.fixture(params=level_params())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    loaded = load_kernels(request.param)
    assert loaded is not None
    return loaded


def weight_and_numbers(kind: Kind, outputs: int = OUTPUTS) -> tuple[QuantizedWeight, torch.Tensor]:
    """Return a weight of random blocks, and its numbers as gguf has them, float64."""
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    rows = gguf_files.random_rows(kind, outputs, INPUTS // block)
    return split(rows, kind), torch.from_numpy(gguf.dequantize(rows, kind)).double()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_are_those_of_gguf_s_numbers(kernels: Kernels, kind: Kind) -> None:
    torch.manual_seed(0)
    weight, numbers = weight_and_numbers(kind)
    product = PackedProduct(kernels, [weight], None, torch.float32)
    assert torch.equal(product.take_rows(torch.arange(OUTPUTS)).double(), numbers)
    for rows in (1, 3, 20, 70):
        x = torch.randn(rows, INPUTS)
        wanted = x.double() @ numbers.T
        size = x.double().abs() @ numbers.abs().T
        assert ((product(x).double() - wanted).abs() / size).max() < 2e-6
    rounded = PackedProduct(kernels, [weight])
    x = torch.randn(40, INPUTS).bfloat16()
    wanted = x.double() @ numbers.T
    assert (rounded(x).double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rounds_inputs", [False, True], ids=["as they are", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS, Kind.MXFP4], ids=lambda kind: kind.name
)
def test_a_row_never_depends_on_the_others(
    kernels: Kernels, kind: Kind, dtype: torch.dtype, rounds_inputs: bool
) -> None:
    torch.manual_seed(0)
    weight, _ = weight_and_numbers(kind, 330)
    product = PackedProduct(kernels, [RoundInputs().apply(weight) if rounds_inputs else weight], None, dtype)
    x = torch.randn(300, INPUTS).to(dtype)
    alone = torch.cat([product(row[None]) for row in x])
    threads = torch.get_num_threads()
    try:
        for rows in (2, 5, 7, 15, 16, 17, 40, 300):
            assert torch.equal(product(x[:rows]), alone[:rows])
        torch.set_num_threads(1)
        assert torch.equal(product(x), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_int8_inputs_are_near(kernels: Kernels, kind: Kind) -> None:
    """As near as inputs rounded to 127 steps of a group let them be, with and without products of bytes."""
    torch.manual_seed(0)
    weight, numbers = weight_and_numbers(kind)
    product = PackedProduct(kernels, [RoundInputs().apply(weight)], None, torch.float32)
    x = torch.randn(20, INPUTS)
    grouped = x.view(len(x), -1, weight.group_size)
    scale = grouped.abs().amax(-1, keepdim=True) / 127
    inputs = ((grouped / scale).round() * scale).view(x.shape).double()
    size = inputs.abs() @ numbers.abs().T
    outputs = product(x)
    assert ((outputs.double() - inputs @ numbers.T).abs() / size).max() < 2e-6
    try:
        kernels.byte_dots(allowed=False)
        assert torch.equal(product(x), outputs)
    finally:
        kernels.byte_dots()


@pytest.mark.parametrize(
    "kinds",
    [
        (Kind.Q4_K, Kind.Q6_K),
        (Kind.Q5_K, Kind.Q6_K),
        (Kind.Q4_K, Kind.Q5_K),
        (Kind.Q4_K, Kind.Q4_0),
        (Kind.IQ4_XS, Kind.Q8_0),
        (Kind.IQ4_NL, Kind.MXFP4),
        (Kind.Q4_K, Kind.IQ4_XS),
    ],
    ids=lambda kinds: "+".join(kind.name for kind in kinds),
)
def test_mixtures_are_joined_exactly(kinds: tuple[Kind, ...]) -> None:
    """As query, key and value of Q4_K_M are; where all have units, so has what they become."""
    weights, numbers = zip(*(weight_and_numbers(kind, 70) for kind in kinds), strict=True)
    joined = alike(weights)
    assert len({(weight.bits, weight.group_size, weight.is_unsigned) for weight in joined}) == 1
    for weight, expected in zip(joined, numbers, strict=True):
        limit = expected.abs().max() * 2e-7
        assert (weight.dequantize(torch.float32).double() - expected).abs().max() <= limit
    kernels = load_kernels()
    assert kernels is not None
    product = PackedProduct(kernels, weights, None, torch.float32)
    x = torch.randn(5, INPUTS)
    wanted = x.double() @ torch.cat(numbers).T
    torch.testing.assert_close(product(x).double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", BITS_READ, ids=lambda kind: kind.name)
def test_memory_is_about_what_the_file_has(kind: Kind) -> None:
    kernels = load_kernels()
    assert kernels is not None
    weight, _ = weight_and_numbers(kind, 640)
    product = PackedProduct(kernels, [weight])
    bits = 8 * product.num_bytes / (640 * INPUTS)
    assert BITS_READ[kind] <= bits < BITS_READ[kind] + 0.1
