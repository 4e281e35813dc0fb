"""Weights in twelve bits: the same products and rows to the bit as of plain ones, whatever the weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weight_memory import weights_together
from stemma.model.cpu.weights import PackedProduct
from stemma.native.library import Kernels, load_kernels
from tests.native.isa import level_params

LEVELS = ("avx512", "avx512_bf16")
ROWS = [*range(1, 18), 24, 33, 64, 65, 255, 300]


@pytest.fixture(params=[p for p in level_params() if p.values[0] in LEVELS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    loaded = load_kernels(request.param)
    assert loaded is not None
    return loaded


@pytest.fixture(autouse=True)
def _set_threads_back() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def with_outliers(weight: torch.Tensor, share: float, seed: int = 1) -> torch.Tensor:
    """Zeros of both signs, denormals, and numbers of any finite exponent in some places."""
    made = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, weight.shape, generator=made).to(torch.int16)
    other = bits.view(torch.bfloat16)
    other = torch.where(other.isfinite() & (other.abs() < 1e15), other, torch.zeros_like(other))
    return torch.where(torch.rand(weight.shape, generator=made) < share, other, weight)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def assert_same(
    kernels: Kernels, weight: torch.Tensor, rows: list[int], *, is_compressed: bool = True
) -> None:
    """Products and rows of the weight are those of its plain form."""
    bias = normal(weight.shape[0], seed=2)
    plain = PackedProduct(kernels, [weight], bias, compressed=False)
    product = PackedProduct(kernels, [weight], bias)
    assert (product.strips.patches is not None) == is_compressed
    x = normal(max(rows), weight.shape[1], seed=3) * 50
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in rows:
            assert torch.equal(bits_of(product(x[:count])), bits_of(plain(x[:count]))), (threads, count)
    ids = torch.arange(weight.shape[0])
    assert torch.equal(bits_of(product.take_rows(ids)), bits_of(weight))


@pytest.mark.parametrize("shape", [(64, 32), (130, 96), (576, 64), (1152, 896), (896, 4864)], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.0003], ids=["normal", "outliers"])
def test_products_are_those_of_the_plain_weight(
    kernels: Kernels, shape: tuple[int, int], share: float
) -> None:
    """Few strips are cut into lines, many aren't; more rows go chunk by chunk."""
    assert_same(kernels, with_outliers(normal(*shape), share), ROWS if shape[1] < 900 else [1, 5, 16, 70])


def test_a_quarter_of_the_memory_is_saved(kernels: Kernels) -> None:
    weight = normal(1024, 1024)
    plain, product = PackedProduct(kernels, [weight], compressed=False), PackedProduct(kernels, [weight])
    assert product.num_bytes < 0.76 * plain.num_bytes
    packing = Packing(kernels, torch.bfloat16)
    packing.tensor(weight)
    assert packing.saved_bytes == 2 * weight.numel() - product.num_bytes


@pytest.mark.parametrize(
    "weight",
    [
        torch.full((70, 64), 0.0).bfloat16(),
        torch.full((64, 64), -0.0).bfloat16(),
        torch.full((128, 96), 1e-39).bfloat16(),
    ],
    ids=["zeros", "negative zeros", "denormals"],
)
def test_weights_of_one_value(kernels: Kernels, weight: torch.Tensor) -> None:
    assert_same(kernels, weight, [1, 9, 40])


def test_pruned_weights(kernels: Kernels) -> None:
    """Zeros lie far from all other exponents of a table."""
    kept = torch.rand(130, 896, generator=torch.Generator().manual_seed(4)) < 0.5
    assert_same(kernels, torch.where(kept, normal(130, 896), torch.zeros(())).bfloat16(), [1, 7, 20, 100])


def test_weights_with_too_many_exponents_stay_plain(kernels: Kernels) -> None:
    """Also within memory that weights share: what the refused copy took serves the next ones."""
    wild = with_outliers(normal(130, 64), 0.5)
    with weights_together():
        assert_same(kernels, wild, [1, 20], is_compressed=False)
        assert_same(kernels, normal(130, 64), [1, 20])
        products = [PackedProduct(kernels, [w]) for w in (wild, normal(130, 64), wild)]
    ids = torch.arange(130)
    for product, weight in zip(products, (wild, normal(130, 64), wild), strict=True):
        assert torch.equal(product.take_rows(ids), weight)


@pytest.mark.parametrize("shape", [(64, 34), (63, 32), (64, 16)], ids=str)
def test_other_shapes_stay_plain(kernels: Kernels, shape: tuple[int, int]) -> None:
    assert_same(kernels, normal(*shape), [1, 3], is_compressed=False)


def test_weights_in_float_stay_plain(kernels: Kernels) -> None:
    assert PackedProduct(kernels, [normal(64, 64).float()]).strips.patches is None


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_mixture_of_exponents(data: st.DataObject) -> None:
    """Tables are made of samples, so some weights of many need patches, and every one is found."""
    kernels = load_kernels()
    if kernels is None or not kernels.reads_compressed():
        pytest.skip(f"needs {LEVELS[0]}")
    n, k = data.draw(st.integers(64, 200), label="n"), 32 * data.draw(st.integers(1, 20), label="k / 32")
    smallest = data.draw(st.integers(-60, 0), label="smallest exponent")
    width = data.draw(st.integers(1, 24), label="exponents")
    seed = data.draw(st.integers(0, 1000), label="seed")
    made = torch.Generator().manual_seed(seed)
    exponents = torch.randint(smallest, smallest + width, (n, k), generator=made)
    rare = torch.rand(n, k, generator=made) < 0.0005
    exponents = torch.where(rare, exponents - 20, exponents)
    weight = torch.ldexp(torch.randn(n, k, generator=made).sign(), exponents).bfloat16()
    plain, product = PackedProduct(kernels, [weight], compressed=False), PackedProduct(kernels, [weight])
    rows = data.draw(st.integers(1, 80), label="rows")
    x = normal(rows, k, seed=seed)
    assert torch.equal(bits_of(product(x)), bits_of(plain(x)))
    assert torch.equal(product.take_rows(torch.arange(n)), weight)
