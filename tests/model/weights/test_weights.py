"""Quantized weights in memory: what codes stand for, what doesn't fit together, how modules get them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from stemma.errors import ModelError
from stemma.model.families.layout import Linear, Norm
from stemma.model.foreign.weights import ModuleWeights
from stemma.model.weights.fields import bytes_of
from stemma.model.weights.multiples import Multiples
from stemma.model.weights.named import NamedWeights
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from stemma.model.weights.stored import DeferredWeight, StoredWeights

SCALES = torch.tensor([[1.0, 2.0], [0.5, 4.0]])
WEIGHT = QuantizedWeight(
    codes=torch.arange(-8, 8, dtype=torch.int8).repeat(2, 2),
    scales=SCALES,
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
    with_minimums = replace(WEIGHT, minimums=-SCALES * zero_points)
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
        ({"codes": bytes_of(WEIGHT.codes).int()}, "must be int8"),
        ({"codes": bytes_of(WEIGHT.codes) + 1}, "outside -8..7"),
        ({"group_size": 12}, "must divide"),
        ({"group_size": 8}, "16 or more"),
        ({"scales": torch.ones(2, 1)}, "is needed"),
        ({"scales": torch.full((2, 2), float("nan"))}, "NaN"),
        ({"zero_points": torch.zeros(2, 2)}, "is needed"),
        ({"scales": Multiples(torch.ones(2, 1, dtype=torch.int8), torch.ones(2, 1))}, "is needed"),
        ({"scales": Multiples(torch.ones(2, 2, dtype=torch.int8), torch.full((2, 1), math.inf))}, "NaN"),
        ({"is_unsigned": True}, "outside 0..15"),
        ({"levels": torch.arange(16, dtype=torch.int8)}, "aren't unsigned"),
        ({"is_unsigned": True, "bits": 8}, "8 bits has unsigned codes"),
        ({"zero_points": torch.zeros(2, 2, dtype=torch.int8), "minimums": torch.ones(2, 2)}, "one of them"),
        ({"activations": ActivationScheme.STATIC_TENSOR}, "activation scale"),
        ({"activations": ActivationScheme.STATIC_TENSOR, "activation_scale": 0.0}, "positive"),
    ],
)
def test_parts_that_dont_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(WEIGHT, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("integers", "units"),
    [
        (torch.ones(2, 6, dtype=torch.int8), torch.ones(2, 2)),
        (torch.ones(2, 4, dtype=torch.int8), torch.ones(1, 2)),
        (torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 8)),
        (torch.ones(2, 4), torch.ones(2, 2)),
    ],
)
def test_units_that_dont_fit_are_refused(integers: torch.Tensor, units: torch.Tensor) -> None:
    with pytest.raises(ModelError, match="have units"):
        Multiples(integers, units)


def deferred(name: str) -> dict[str, DeferredWeight]:
    return {name: DeferredWeight(WEIGHT.shape, lambda: WEIGHT)}


def test_codes_are_found_by_module() -> None:
    model = nn.Module()
    model.proj, model.plain = nn.Linear(32, 2), nn.Linear(32, 2, bias=False)
    model.experts = nn.Module()
    weights = ModuleWeights(model, deferred("proj.weight") | deferred("experts.3.up_proj.weight"))
    assert weights.num_codes == 2
    assert weights.linear(model.proj).weight is WEIGHT
    assert weights.linear(model.proj).bias is not None
    assert weights.linear(model.plain).bias is None
    plain = weights.linear(model.plain).weight
    assert isinstance(plain, torch.Tensor)
    assert torch.equal(plain, model.plain.weight)
    experts = weights.experts(model.experts, "up_proj", torch.zeros(4, 2, 32))
    assert [weight is WEIGHT for weight in experts] == [False, False, False, True]


def test_a_tied_head_takes_the_embeddings_codes() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(2, 32), nn.Linear(32, 2, bias=False)
    weights = ModuleWeights(model, deferred("embed.weight"))
    assert weights.head(model.head, model.embed).weight is WEIGHT
    assert weights.head(model.head).weight is not WEIGHT


def test_codes_without_a_place_are_refused() -> None:
    model = nn.Module()
    model.proj = nn.Linear(16, 2)
    with pytest.raises(ModelError, match="no place"):
        ModuleWeights(model, deferred("other.weight"))
    with pytest.raises(ModelError, match=r"\[2, 16\] in the model"):
        ModuleWeights(model, deferred("proj.weight"))


def test_stored_weights_are_made_when_they_are_asked_for() -> None:
    made: list[int] = []

    def make() -> QuantizedWeight:
        made.append(1)
        return WEIGHT

    stored = StoredWeights({"proj.weight": DeferredWeight(WEIGHT.shape, make), "norm.weight": torch.ones(3)})
    assert stored.shapes() == {"proj.weight": WEIGHT.shape, "norm.weight": torch.Size([3])}
    assert not made
    plain = stored.dequantized(torch.bfloat16)
    assert {name: value.dtype for name, value in plain.items()} == {
        "proj.weight": torch.bfloat16,
        "norm.weight": torch.float32,
    }
    assert len(made) == 1


def test_named_weights_are_of_the_models_dtype_and_checked() -> None:
    checked: list[str] = []
    tensors = {
        "proj.weight": torch.ones(2, 4, dtype=torch.float16),
        "proj.bias": torch.ones(2),
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "correction": torch.full((3,), 1 / 3),
    }
    weights = NamedWeights(tensors, torch.bfloat16, lambda name, _weight: checked.append(name))
    affine = weights.affine(Linear("proj", 2, 4, has_bias=True))
    assert isinstance(affine.weight, torch.Tensor)
    assert affine.bias is not None
    assert affine.weight.dtype == affine.bias.dtype == torch.bfloat16
    norm = weights.norm(Norm("norm", 4, 1e-6))
    assert norm.data_ptr() != tensors["norm.weight"].data_ptr()  # its file may be closed
    assert torch.equal(weights.floats("correction"), tensors["correction"])
    assert checked == ["proj.weight", "proj.bias", "norm.weight", "correction"]
