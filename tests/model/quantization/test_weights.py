"""Quantized weights in memory: what codes stand for, what doesn't fit together, how modules get them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stemma.errors import ModelError
from stemma.model.quantization.attach import attach, attached, fill, is_spare, plain_weights, spares_stay
from stemma.model.quantization.stored import DeferredWeight, StoredWeights
from stemma.model.quantization.weights import ActivationScheme, QuantizedWeight

WEIGHT = QuantizedWeight(
    codes=torch.arange(-8, 8, dtype=torch.int8).repeat(2, 2),
    scales=torch.tensor([[1.0, 2.0], [0.5, 4.0]]),
    zero_points=None,
    bits=4,
    group_size=16,
    activations=ActivationScheme.DYNAMIC_TOKEN,
)


def test_symmetric_codes_are_multiplied_by_their_groups_scale() -> None:
    codes = torch.arange(-8.0, 8.0)
    expected = torch.stack((torch.cat((codes, 2 * codes)), torch.cat((codes / 2, 4 * codes))))
    assert torch.equal(WEIGHT.dequantize(torch.float32), expected)
    assert WEIGHT.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_zero_points_and_minimums_say_the_same() -> None:
    zero_points = torch.tensor([[1, -2], [3, 7]], dtype=torch.int8)
    with_zeros = replace(WEIGHT, zero_points=zero_points)
    with_minimums = replace(WEIGHT, minimums=-WEIGHT.scales * zero_points)
    torch.testing.assert_close(with_zeros.dequantize(torch.float32), with_minimums.dequantize(torch.float32))
    assert [weight.offsets() is None for weight in (WEIGHT, with_zeros, with_minimums)] == [
        True,
        False,
        False,
    ]


def test_rows_are_those_of_the_dequantized_weight() -> None:
    weight = replace(WEIGHT, minimums=torch.ones(2, 2))
    assert torch.equal(weight.rows(1, 2).dequantize(torch.float32), weight.dequantize(torch.float32)[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "3 bits"),
        ({"codes": WEIGHT.codes.int()}, "must be int8"),
        ({"codes": WEIGHT.codes + 1}, "outside -8..7"),
        ({"group_size": 12}, "must divide"),
        ({"group_size": 8}, "16 or more"),
        ({"scales": torch.ones(2, 1)}, "is needed"),
        ({"scales": torch.full((2, 2), float("nan"))}, "NaN"),
        ({"zero_points": torch.zeros(2, 2)}, "is needed"),
        ({"zero_points": torch.zeros(2, 2, dtype=torch.int8), "minimums": torch.ones(2, 2)}, "one of them"),
        ({"activations": ActivationScheme.STATIC_TENSOR}, "activation scale"),
        ({"activations": ActivationScheme.STATIC_TENSOR, "activation_scale": 0.0}, "positive"),
    ],
)
def test_parts_that_dont_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(WEIGHT, **change)  # type: ignore[arg-type]


def test_attached_weights_are_found_by_module() -> None:
    model = nn.Module()
    model.proj = nn.Linear(32, 2)
    model.experts = nn.Module()
    names = {"proj.weight": WEIGHT, "experts.3.up_proj.weight": WEIGHT, "norm.weight": torch.ones(3)}
    plain = plain_weights(names, torch.bfloat16)
    assert {name: value.dtype for name, value in plain.items()} == {
        "proj.weight": torch.bfloat16,
        "experts.3.up_proj.weight": torch.bfloat16,
        "norm.weight": torch.float32,
    }
    deferred = DeferredWeight(WEIGHT.shape, lambda: WEIGHT)
    attach(model, {name: deferred for name in names if name != "norm.weight"})
    assert attached(model.proj) is WEIGHT
    assert attached(model.experts, "3.up_proj.weight") is WEIGHT
    assert attached(model.experts, "2.up_proj.weight") is None
    assert attached(nn.Linear(2, 2)) is None


def test_attached_weights_without_a_place_are_refused() -> None:
    model = nn.Module()
    model.proj = nn.Linear(16, 2)
    with pytest.raises(ModelError, match="no place"):
        attach(model, {"other.weight": DeferredWeight(WEIGHT.shape, lambda: WEIGHT)})
    with pytest.raises(ModelError, match=r"\[2, 16\] in the model"):
        attach(model, {"proj.weight": DeferredWeight(WEIGHT.shape, lambda: WEIGHT)})


def test_a_spare_stands_for_what_is_packed_later() -> None:
    deferred = DeferredWeight(WEIGHT.shape, lambda: WEIGHT)
    names = ("up_proj.weight", "kv_b_proj.weight", "experts.0.up_proj.weight", "experts.1.up_proj.weight")
    stored = StoredWeights({name: deferred for name in names} | {"norm.weight": torch.ones(3)})
    plain = plain_weights(stored, torch.bfloat16, spares=True)
    assert [name for name in stored if is_spare(plain[name])] == [names[0], *names[2:]]
    assert plain["up_proj.weight"].untyped_storage().nbytes() == 2
    with spares_stay():
        stacked = torch.stack([plain[name] for name in names[2:]])
        joined = torch.cat([stacked, stacked], dim=1)
        mixed = torch.cat([plain["up_proj.weight"], plain["kv_b_proj.weight"]])
    assert is_spare(joined)
    assert joined.shape == (2, 2 * WEIGHT.shape[0], WEIGHT.shape[1])
    assert not is_spare(mixed)
    assert mixed.shape == (2 * WEIGHT.shape[0], WEIGHT.shape[1])
    model = nn.Linear(WEIGHT.shape[1], WEIGHT.shape[0], bias=False)
    model.weight.data = plain["up_proj.weight"].float()
    assert is_spare(model.weight) is False  # changed dtypes are copies; the loader never changes them
    model.weight.data = torch.zeros(()).expand(WEIGHT.shape)
    attach(model, {"weight": deferred})
    fill(model)
    assert torch.equal(model.weight, WEIGHT.dequantize(torch.float32))
