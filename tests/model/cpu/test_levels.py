"""Every instruction-set level computes what plain transformers computes."""

from __future__ import annotations

import random

import pytest
import torch
from tests.checkpoints import FAMILIES, MOE_FAMILIES
from tests.model.conftest import MODULES, NATIVE, LoadFamily
from tests.model.paging import PagedSequences, plain_logits
from tests.native.isa import level_params

FP32_TOLERANCE = 1e-4
BF16_TOLERANCE = 2e-2


def run_all(load_family: LoadFamily, family: str, dtype: str, how: str, isa: str) -> torch.Tensor:
    """Chunks of several sizes and decodes in shared steps; return the error of each token."""
    path, model = load_family(family, dtype, how, isa)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 200) for _ in range(length)] for length in (70, 41, 9)]
    run = PagedSequences(model, prompts)
    run.step([(0, 50), (1, 7)])
    run.step([(1, 13), (0, 1), (2, 8)])
    run.finish(chunk=5)
    errors: list[torch.Tensor] = []
    for prompt, logits in zip(prompts, run.logits, strict=True):
        expected = plain_logits(path, prompt, getattr(torch, dtype))
        if dtype == "float32":
            errors.append((logits - expected).abs().amax(-1))
        else:
            errors.append((logits - expected).norm(dim=-1) / expected.norm(dim=-1))
    return torch.cat(errors)


@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_transformers(family: str, isa: str, load_family: LoadFamily) -> None:
    assert run_all(load_family, family, "float32", NATIVE, isa).max() < FP32_TOLERANCE


@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_as_bfloat16_gets(family: str, isa: str, load_family: LoadFamily) -> None:
    """A router whose choice hangs on rounding may send a few tokens to other experts."""
    errors = run_all(load_family, family, "bfloat16", NATIVE, isa)
    assert errors.median() < BF16_TOLERANCE
    if family not in MOE_FAMILIES:
        assert errors.mean() < BF16_TOLERANCE


@pytest.mark.parametrize("isa", level_params(emulated=False))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_with_native_attention(dtype: str, isa: str, load_family: LoadFamily) -> None:
    limit = FP32_TOLERANCE if dtype == "float32" else BF16_TOLERANCE
    assert run_all(load_family, "qwen2", dtype, MODULES, isa).mean() < limit
