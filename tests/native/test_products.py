"""Products with packed weights at every level: right, and each row the same to the bit in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.model.cpu.weights import PackedProduct
from stemma.native.levels import EMULATED, missing_features
from stemma.native.library import Kernels, load_kernels
from tests.native.isa import level_params

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
MOST_ROWS = 70
"""More than the rows that any level sums at a time for a strip, but AMX (256)."""


@pytest.fixture(params=level_params())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    loaded = load_kernels(request.param)
    assert loaded is not None
    return loaded


@pytest.fixture
def _set_threads_back() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (130, 70), (1, 2), (7, 900), (896, 128), (300, 1030)])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 300])
def test_equal_to_torch(kernels: Kernels, shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1)
    x = random(num_rows, shape[1], dtype=dtype, seed=2)
    for b in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        output = PackedProduct(kernels, [weight], b)(x)
        assert output.dtype == dtype
        assert (output - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("_set_threads_back")
def test_a_row_is_the_same_in_any_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    """Whatever the number of rows, its place among them, and the number of threads."""
    # Nine strips: two threads can't have as many each, so many rows are cut into blocks.
    product = PackedProduct(kernels, [random(570, 1100, dtype=dtype)], random(570, dtype=dtype, seed=1))
    x = random(MOST_ROWS, 1100, dtype=dtype, seed=2) * 3
    torch.set_num_threads(1)
    alone = torch.cat([product(x[i : i + 1]) for i in range(MOST_ROWS)])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for num_rows in range(1, MOST_ROWS + 1):
            assert torch.equal(product(x[:num_rows]), alone[:num_rows])
            assert torch.equal(product(x[-num_rows:]), alone[-num_rows:])
        many = product(x.repeat(9, 1))
        assert torch.equal(many, alone.repeat(9, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_shape_any_batch(dtype: torch.dtype, data: st.DataObject) -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("needs native kernels")
    n, pairs = data.draw(st.integers(1, 200), label="n"), data.draw(st.integers(1, 300), label="k / 2")
    num_rows = data.draw(st.integers(1, 150), label="rows")
    row = data.draw(st.integers(0, num_rows - 1), label="row")
    product = PackedProduct(kernels, [random(n, 2 * pairs, dtype=dtype)])
    x = random(num_rows, 2 * pairs, dtype=dtype, seed=1)
    assert torch.equal(product(x)[row], product(x[row : row + 1])[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_below_each_other_are_one(kernels: Kernels, dtype: torch.dtype) -> None:
    """Query, key and value: borders anywhere in a strip, rows of any stride."""
    weights = [random(rows, 96, dtype=dtype, seed=rows)[:, :70] for rows in (100, 7, 64, 1)]
    x = random(5, 70, dtype=dtype)
    joined = PackedProduct(kernels, weights)
    assert torch.equal(joined(x), torch.cat([PackedProduct(kernels, [w])(x) for w in weights], dim=1))
    assert torch.equal(joined.take_rows(torch.arange(172)), torch.cat(weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (130, 70), (1, 2), (7, 4864)])
def test_rows_come_out_as_they_went_in(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random(*shape, dtype=dtype)
    ids = torch.randint(shape[0], (300,), generator=torch.Generator().manual_seed(0))
    product = PackedProduct(kernels, [weight])
    assert torch.equal(product.take_rows(ids), weight[ids])
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError):
            product.take_rows(torch.tensor([0, wrong]))


def test_rows_between_others_are_taken_where_they_are(kernels: Kernels) -> None:
    """x and its rows need not be contiguous."""
    product = PackedProduct(kernels, [random(80, 64, dtype=torch.bfloat16)])
    x = random(33, 192, dtype=torch.bfloat16)[:, 64:128]
    assert torch.equal(product(x), product(x.contiguous()))
    assert product(x[:0]).shape == (0, 80)


def test_emulated_tiles_round_as_the_manual_says() -> None:
    """Even and odd products are summed apart, 32 inputs at a time; denormals count as zero."""
    if missing := missing_features(EMULATED):
        pytest.skip(f"needs {', '.join(missing)}")
    kernels = load_kernels(EMULATED.name)
    if kernels is None:
        pytest.skip("needs a C++ compiler")
    weight, x = random(16, 96, dtype=torch.bfloat16), random(3, 96, dtype=torch.bfloat16, seed=1)
    weight[:, 5], x[:, 7] = 1e-39, 1e-39  # denormal in bfloat16
    weight[:, 9], x[:, 9] = 2e-30, 2e-30  # their product is denormal in float32
    expected = torch.zeros(3, 16)
    for first in range(0, 96, 32):
        even, odd = torch.zeros(3, 16), torch.zeros(3, 16)
        for k in range(first, first + 32, 2):
            even = _fused(x[:, k], weight[:, k], even)
            odd = _fused(x[:, k + 1], weight[:, k + 1], odd)
        expected = _flushed(expected + _flushed(even + odd))
    assert torch.equal(PackedProduct(kernels, [weight])(x), expected.bfloat16())


def _flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


def _fused(x: torch.Tensor, w: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """x w + total with one rounding: products of bfloat16 are exact in double, and nearly all these sums."""
    x, w = _flushed(x.float()), _flushed(w.float())
    return _flushed((x.double()[:, None] * w.double()[None] + total.double()).float())
