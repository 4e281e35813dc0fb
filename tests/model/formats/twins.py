"""A checkpoint beside its quantized twin: what a reader makes of the twin is compared with the plain one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from stemma.config.settings import ModelSettings
from stemma.model.formats.reading import find_format, read_quantized
from stemma.model.load.loading import load_model
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from tests.model.paging import PagedSequences, plain_logits
from tests.quantized_files import Twin

NONE, PER_TOKEN, STATIC = (
    ActivationScheme.NONE,
    ActivationScheme.DYNAMIC_TOKEN,
    ActivationScheme.STATIC_TENSOR,
)


def read(path: Path) -> Mapping[str, torch.Tensor | QuantizedWeight]:
    quantization = json.loads((path / "config.json").read_text()).get("quantization_config") or {}
    name = find_format(path, quantization)
    assert name is not None
    return read_quantized(path, name, quantization, None, torch.float32)[0]


def check(twin: Twin, scheme: ActivationScheme, *, quantized: bool = True) -> None:
    """Every weight is there, with the numbers of the plain checkpoint."""
    numbers, weights = twin.numbers(), read(twin.quantized)
    assert weights.keys() == numbers.keys()
    for name, weight in weights.items():
        if isinstance(weight, QuantizedWeight):
            assert weight.activations is scheme
            weight = weight.dequantize(torch.float32)
        else:
            assert not (quantized and name.endswith("_proj.weight")), name
        torch.testing.assert_close(weight, numbers[name], rtol=1e-5, atol=1e-6, msg=name)


def check_logits(twin: Twin, tolerance: float = 1e-3) -> None:
    model = load_model(ModelSettings(path=twin.quantized, dtype="float32", device="cpu"))
    prompt = list(range(20, 60))
    run = PagedSequences(model, [prompt])
    run.finish(chunk=16)
    torch.testing.assert_close(run.logits[0], plain_logits(twin.plain, prompt), atol=tolerance, rtol=0)
