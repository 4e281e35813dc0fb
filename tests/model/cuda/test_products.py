"""Products whose rows don't depend on the batch, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu, silu

pytest.importorskip("triton")

from tests.model.cuda.lone_columns import columns_are_alone  # noqa: F401 - used by itself

from stemma.model.cuda.products import Chosen, CodedWeight, Gate, Weight, launch_of, num_pieces
from stemma.model.formats.fp8 import coded_floats
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight

COUNTS = (1, 17, 130)
"""Launches of each kind: a piece a program in small and larger tiles, and all pieces in one."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


def activated(activation: Callable[[torch.Tensor], torch.Tensor], both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return activation(gate) * up


@pytest.mark.parametrize(("n", "k"), [(128, 256), (70, 40)], ids=["in pieces", "with ends"])
def test_rows_are_the_products_in_any_number(n: int, k: int) -> None:
    x, w, bias = random(130, k), random(n, k, seed=1), random(n, seed=2)
    weight = Weight(w, bias)
    whole = weight(x).join()
    torch.testing.assert_close(whole, x @ w.T + bias, rtol=1e-4, atol=1e-5)
    for count in COUNTS:
        assert torch.equal(weight(x[-count:]).join(), whole[-count:])


@pytest.mark.parametrize(("kind", "activation"), [(1, silu), (2, lambda x: gelu(x, approximate="tanh"))])
def test_a_gate_is_part_of_the_product(kind: int, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, w, bias = random(130, 64), random(2 * 70, 64, seed=1), random(2 * 70, seed=2)
    weight = Weight(w, bias, Gate(kind))
    whole = weight(x).join()
    torch.testing.assert_close(whole, activated(activation, x @ w.T + bias), rtol=1e-4, atol=1e-5)
    for count in COUNTS[:2]:
        assert torch.equal(weight(x[-count:]).join(), whole[-count:])


def test_experts_multiply_the_rows_that_chose_them() -> None:
    """Those that nobody chose take no part, however many tokens the others have."""
    num_experts, top_k = 5, 2
    x, w = random(20, 48), random(num_experts, 30, 48, seed=1)
    ids = torch.tensor([[4, 1] if token < 18 else [0, 4] for token in range(20)])
    sorted_ids, order = ids.flatten().sort(stable=True)
    starts = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1))
    outputs = Weight(w).by_expert(x, Chosen(order, starts, top_k)).view(20, top_k, 30)
    wanted = torch.einsum("tk,tcnk->tcn", x, w[ids])
    torch.testing.assert_close(outputs, wanted, rtol=1e-4, atol=1e-5)


def test_groups_have_weights_of_their_own() -> None:
    x, w, y = random(3, 4, 20), random(4, 10, 20, seed=1), torch.empty(3, 4, 12)
    Weight(w).by_group(x, y[..., :10])
    torch.testing.assert_close(y[..., :10], torch.einsum("thk,hnk->thn", x, w), rtol=1e-4, atol=1e-5)


CODES = {
    "4 bits, symmetric, groups of 64": (4, 64, False, False),
    "4 bits with zero points, groups of 32": (4, 32, True, False),
    "8 bits with minimums, one group": (8, 128, False, True),
}


@pytest.mark.parametrize(("bits", "group", "zeros", "minimums"), CODES.values(), ids=CODES)
def test_codes_are_multiplied_as_the_numbers_that_they_stand_for(
    bits: int, group: int, zeros: bool, minimums: bool
) -> None:
    """To the bit; in float32, since the interpreter rounds to bfloat16 as torch doesn't."""
    n, k, generator = 70, 128, torch.Generator().manual_seed(3)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (n, k), generator=generator, dtype=torch.int8)
    scales = torch.rand(n, k // group, generator=generator) / half + 1e-3
    points = torch.randint(-half, half, scales.shape, generator=generator, dtype=torch.int8)
    weight = QuantizedWeight(
        *(codes, scales, points if zeros else None, bits, group, ActivationScheme.NONE),
        minimums=scales.flip(0) if minimums else None,
    )
    x = random(17, k)
    plain = Weight(weight.dequantize(torch.float32))
    ours = Weight(CodedWeight.of(weight, torch.float32, torch.device("cpu")))
    for count in COUNTS[:2]:
        assert torch.equal(ours(x[:count]).join(), plain(x[:count]).join())


@pytest.mark.parametrize(("high", "wide", "k"), [(1, 128, 128), (64, 64, 128), (128, 32, 72)])
def test_fp8_is_multiplied_as_codes(high: int, wide: int, k: int) -> None:
    """By a scale for each row, or of blocks, whole or not: the bits of the numbers that they stand for."""
    weights = []
    for rows, seed in ((70, 1), (30, 2)):
        codes = (random(rows, k, seed=seed) * 40).to(torch.float8_e4m3fn)
        scale = random(-(-rows // high), -(-k // wide), seed=seed)
        weights.append(coded_floats(Path(), "w", codes, scale, (high, wide), torch.float32))
    x, plain = random(17, k), Weight(torch.cat([weight.plain() for weight in weights]))
    ours = Weight(CodedWeight.of_floats(weights, torch.device("cpu")))
    for count in COUNTS[:2]:
        assert torch.equal(ours(x[:count]).join(), plain(x[:count]).join())


def test_pieces_depend_on_the_weight_alone_and_tiles_on_the_tokens() -> None:
    assert [num_pieces(*shape) for shape in ((4096, 4096), (128_256, 4096), (896, 4864))] == [8, 1, 4]
    assert [launch_of(count).block_t for count in (1, 16, 17, 100, 128, 129, 8192)] == [
        *(16, 16, 32, 128, 128, 128, 128)
    ]
    assert [launch_of(count).is_apart for count in (128, 129)] == [True, False]
