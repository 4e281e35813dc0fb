"""Products with quantized weights at every level: right, and each row the same to the bit in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from stemma.model.cpu.weights import PackedProduct
from stemma.model.weights.fields import bytes_of
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from stemma.model.weights.rounding import RoundToNearest, quantize
from stemma.native.library import Kernels, load_kernels
from tests.native.isa import level_params

ROWS = (1, 2, 5, 6, 7, 15, 16, 17, 40, 70, 300)
SCHEMES = list(ActivationScheme)


@pytest.fixture(params=level_params())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    loaded = load_kernels(request.param)
    assert loaded is not None
    return loaded


@pytest.fixture(params=["vnni", "without"])
def dots(request: pytest.FixtureRequest, kernels: Kernels) -> Iterator[Kernels]:
    """The kernels with and without the processor's instruction for products of bytes."""
    if kernels.byte_dots() is False and request.param == "vnni":
        pytest.skip("needs avx512_vnni or avx_vnni")
    kernels.byte_dots(allowed=request.param == "vnni")
    yield kernels
    kernels.byte_dots()


def random_weight(
    n: int, k: int, *, bits: int = 8, group_size: int = 32, scheme: ActivationScheme = ActivationScheme.NONE
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(n * k + bits)
    limit = 1 << (bits - 1)
    static = scheme is ActivationScheme.STATIC_TENSOR
    shape = n, k // group_size
    return QuantizedWeight(
        codes=torch.randint(-limit, limit, (n, k), dtype=torch.int8, generator=generator),
        scales=torch.rand(shape, generator=generator) * 0.02,
        zero_points=torch.randint(-limit, limit, shape, dtype=torch.int8, generator=generator),
        bits=bits,
        group_size=group_size,
        activations=scheme,
        activation_scale=0.03 if static else None,
        activation_zero_point=-7 if static else 0,
    )


def expected(weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Fake-quantize x [T, k] as the weight says; multiply in float64."""
    x = x.float()
    if weight.activations is ActivationScheme.DYNAMIC_TOKEN:
        scale = x.abs().amax(-1, keepdim=True) / 127
        x = (x / scale).nan_to_num().round() * scale
    elif weight.activations is ActivationScheme.DYNAMIC_GROUP:
        grouped = x.view(len(x), -1, weight.group_size)
        scale = grouped.abs().amax(-1, keepdim=True) / 127
        x = ((grouped / scale).nan_to_num().round() * scale).view(x.shape)
    elif weight.activations is ActivationScheme.STATIC_TENSOR:
        fixed, zero = weight.activation_scale, weight.activation_zero_point
        assert fixed is not None
        x = ((x / fixed).round().add(zero).clamp(-128, 127) - zero) * fixed
    output = x.double() @ weight.dequantize(torch.float32).double().T
    return output if bias is None else output + bias.double()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bits", [8, 6, 5, 4])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(150, 96, 32), (64, 640, 128), (70, 48, 16), (200, 1032, 1032), (33, 200, 40)]
)
def test_equal_to_the_dequantized_weight(
    dots: Kernels, n: int, k: int, group_size: int, bits: int, scheme: ActivationScheme
) -> None:
    torch.manual_seed(0)
    weight = random_weight(n, k, bits=bits, group_size=group_size, scheme=scheme)
    bias = torch.randn(n)
    product = PackedProduct(dots, [weight], bias, torch.float32)
    for rows in (1, 6, 7, 37):
        x = torch.randn(rows, k)
        wanted = expected(weight, x, bias)
        assert (product(x).double() - wanted).abs().max() < 2e-6 * wanted.abs().max() * k**0.5


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bits", [8, 6, 5, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_never_depends_on_the_others(
    kernels: Kernels, dtype: torch.dtype, bits: int, scheme: ActivationScheme
) -> None:
    torch.manual_seed(0)
    weight = random_weight(330, 1152, bits=bits, group_size=64, scheme=scheme)
    product = PackedProduct(kernels, [weight], None, dtype)
    x = torch.randn(max(ROWS), 1152).to(dtype)
    alone = torch.cat([product(row[None]) for row in x])
    threads = torch.get_num_threads()
    try:
        for rows in ROWS:
            assert torch.equal(product(x[:rows]), alone[:rows])
        torch.set_num_threads(1)
        assert torch.equal(product(x), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
def test_all_ways_to_multiply_bytes_give_the_same_bits(kernels: Kernels, bits: int) -> None:
    weight = random_weight(130, 384, bits=bits, scheme=ActivationScheme.DYNAMIC_TOKEN)
    product = PackedProduct(kernels, [weight], None, torch.bfloat16)
    x = torch.randn(40, 384).bfloat16()
    outputs = [product(x), product(x[:3])]
    try:
        kernels.byte_dots(allowed=False)
        assert torch.equal(product(x), outputs[0])
        assert torch.equal(product(x[:3]), outputs[1])
    finally:
        kernels.byte_dots()


TABLES = {
    "mxfp4": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
    "iq4": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    "31 apart": [-16, *[0] * 14, 15],
    "32 apart": [-16, *[0] * 14, 16],
    "all of int8": [-128, *[0] * 14, 127],
    "positive": [100, *[110] * 14, 127],
}


def assert_exact(kernels: Kernels, weight: QuantizedWeight, x: torch.Tensor) -> None:
    """Products with scales of one are integers that float32 holds: they must be met exactly."""
    codes = bytes_of(weight.codes) if weight.levels is None else weight.levels[bytes_of(weight.codes).int()]
    wanted = x.long() @ codes.long().T
    assert wanted.abs().max() < 1 << 24
    product = PackedProduct(kernels, [weight], None, torch.float32)
    for rows in (1, 2, 3, 5, 6, 13, 40):
        assert torch.equal(product(x[:rows]).long(), wanted[:rows])


def extreme(shape: tuple[int, int], lowest: int, highest: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of only the one, only the other, and both mixed."""
    values = torch.where(torch.rand(shape, generator=generator) < 0.5, lowest, highest)
    values[0::4] = lowest
    values[1::4] = highest
    return values


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s is not ActivationScheme.NONE])
@pytest.mark.parametrize("group_size", [16, 32, 40, 128, 320, 640])
@pytest.mark.parametrize("bits", [8, 6, 5, 4, *TABLES])
def test_sums_of_extreme_codes_and_inputs_are_exact(
    dots: Kernels, bits: int | str, group_size: int, scheme: ActivationScheme
) -> None:
    """No sum of products leaves the integers that hold it, whatever way the processor multiplies bytes."""
    k = 640
    generator = torch.Generator().manual_seed(group_size)
    levels = torch.tensor(TABLES[bits], dtype=torch.int8) if isinstance(bits, str) else None
    width = 4 if isinstance(bits, str) else bits
    lowest, highest = (0, 15) if levels is not None else (-(1 << (width - 1)), (1 << (width - 1)) - 1)
    if levels is not None:
        lowest, highest = int(levels.argmin()), int(levels.argmax())
    static = scheme is ActivationScheme.STATIC_TENSOR
    weight = QuantizedWeight(
        codes=extreme((100, k), lowest, highest, generator).to(torch.int8),
        scales=torch.ones(100, k // group_size),
        zero_points=None,
        bits=width,
        group_size=group_size,
        activations=scheme,
        activation_scale=1.0 if static else None,
        is_unsigned=levels is not None,
        levels=levels,
    )
    assert_exact(dots, weight, extreme((40, k), -128 if static else -127, 127, generator).float())


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
@pytest.mark.parametrize("group_size", [16, 32, 40, 128, 1280])
def test_inputs_as_they_are_meet_exact_codes(kernels: Kernels, group_size: int, bits: int) -> None:
    """Only the output is rounded to bf16: nearer than a weight that was."""
    torch.manual_seed(0)
    weight = random_weight(100, 1280, bits=bits, group_size=group_size)
    product = PackedProduct(kernels, [weight], None, torch.bfloat16)
    for rows in (1, 3, 20):
        x = torch.randn(rows, 1280).bfloat16()
        wanted = expected(weight, x)
        error = (product(x).double() - wanted).abs()
        assert (error <= 2**-8 * wanted.abs() + 2**-14 * wanted.abs().max()).all()
        assert (product(x) != wanted.bfloat16()).double().mean() < 0.02


def test_weights_of_different_forms_are_joined_exactly(kernels: Kernels) -> None:
    """Query in 4 bits with minimums, key in 8 bits, value in smaller groups: as GGUF's mixtures have them."""
    dynamic = ActivationScheme.DYNAMIC_TOKEN
    query = replace(
        random_weight(70, 128, bits=4, scheme=dynamic), zero_points=None, minimums=torch.randn(70, 4)
    )
    key = replace(random_weight(20, 128, group_size=64, scheme=dynamic), zero_points=None)
    value = random_weight(30, 128, group_size=16, scheme=dynamic)
    x = torch.randn(9, 128)
    joined = PackedProduct(kernels, [query, key, value], None, torch.float32)(x)
    for part, weight in zip(joined.split([70, 20, 30], 1), (query, key, value), strict=True):
        torch.testing.assert_close(part.double(), expected(weight, x), atol=1e-4, rtol=1e-4)


def test_rows_are_taken_dequantized(kernels: Kernels) -> None:
    for bits in (8, 6, 5, 4):
        weight = replace(random_weight(130, 96, bits=bits), zero_points=None)
        for dtype in (torch.float32, torch.bfloat16):
            product = PackedProduct(kernels, [weight], None, dtype)
            ids = torch.tensor([0, 129, 64, 63, 64])
            assert torch.equal(product.take_rows(ids), weight.dequantize(dtype)[ids])


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
@pytest.mark.parametrize("group_size", [32, 160, 1280])
def test_groups_of_any_size_give_a_row_the_same_bits(kernels: Kernels, group_size: int, bits: int) -> None:
    """Inputs as they are: large groups are taken in pieces, by few rows and by many."""
    torch.manual_seed(0)
    product = PackedProduct(
        kernels, [random_weight(330, 1280, bits=bits, group_size=group_size)], None, torch.bfloat16
    )
    x = torch.randn(70, 1280).bfloat16()
    alone = torch.cat([product(row[None]) for row in x])
    for rows in (2, 3, 4, 7, 70):
        assert torch.equal(product(x[:rows]), alone[:rows])


def test_inputs_as_they_are_may_be_anything(kernels: Kernels) -> None:
    """The smallest and largest numbers of bf16 beside others; what isn't finite harms its own row alone."""
    weight = random_weight(64, 256, group_size=64)
    product = PackedProduct(kernels, [weight], None, torch.bfloat16)
    x = torch.randn(6, 256).bfloat16()
    x[1] = 0.0
    x[2] *= 2.0**-110
    x[3, :64] *= 2.0**100
    x[4, 7], x[5, 9] = float("nan"), float("inf")
    output = product(x)
    wanted = expected(weight, x[:4])
    limit = 2**-8 * wanted.abs() + 2**-14 * wanted.abs().amax(dim=1, keepdim=True) + 2.0**-110
    assert ((output[:4].double() - wanted).abs() <= limit).all()
    assert not torch.isfinite(output[4:]).any()


def test_inputs_of_zero_and_of_nan(dots: Kernels) -> None:
    weight = random_weight(64, 64, scheme=ActivationScheme.DYNAMIC_TOKEN)
    product = PackedProduct(dots, [weight], torch.arange(64.0), torch.float32)
    x = torch.zeros(4, 64)
    x[1, 7] = float("nan")
    x[2, 3] = float("inf")
    output = product(x)
    assert torch.equal(output[[0, 3]], torch.arange(64.0).repeat(2, 1))
    assert not torch.isfinite(output[1:3]).any()


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.004), (4, 0.07)])
def test_rounding_keeps_most_of_a_weight(bits: int, limit: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 192).bfloat16() * 0.02
    rounded = quantize(weight, RoundToNearest(bits, 128))
    assert rounded is not None
    assert rounded.group_size == 64  # 192 is no multiple of 128
    error = (rounded.dequantize(torch.float32) - weight.float()).abs().amax() / weight.float().abs().amax()
    assert error < limit
    assert quantize(torch.randn(4, 40), RoundToNearest(bits, 32)) is None
