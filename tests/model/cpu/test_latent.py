"""Latent attention and DeepSeek's routers in the one native call of a step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import build
from tests.model.conftest import MODULES, NATIVE, LoadFamily
from tests.model.paging import PagedSequences, plain_logits
from tests.native.isa import level_params

from stemma.config.settings import KVDtype, ModelSettings
from stemma.model.cpu.fused import FusedDecoder
from stemma.model.load.loading import load_model
from stemma.native.library import load_kernels

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

TOLERANCE = 1e-4
FAMILIES = ("deepseek-v2", "deepseek-v3", "deepseek-v3-no-q-lora")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3, halves rotated": ("deepseek-v3", {"rope_interleave": False}),
    "v3, biases, weights not normalized": (
        "deepseek-v3",
        {"attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "v3, YaRN": (
        "deepseek-v3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
    "v2, groups": (
        "deepseek-v2",
        {
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "v2, biases and a query's own latent": (
        "deepseek-v2",
        {"attention_bias": True, "mlp_bias": True, "q_lora_rank": 20},
    ),
    "v2, wide heads": ("deepseek-v2", {"kv_lora_rank": 288, "v_head_dim": 80, "qk_nope_head_dim": 34}),
}


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    path = build(family, tmp_path, **overrides)
    if family == "deepseek-v3":  # a choice that differs from that by scores alone
        tensors = load_file(path / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.linspace(-0.3, 0.3, len(tensor)).flip(0))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(ModelSettings(path=path, dtype="float32", device="cpu"))
    assert isinstance(model.decoder, FusedDecoder)
    prompts = prompts_of(70, 33)
    run = PagedSequences(model, prompts)
    run.step([(0, 50), (1, 7)])
    run.finish(chunk=4)
    for prompt, logits in zip(prompts, run.logits, strict=True):
        torch.testing.assert_close(logits, plain_logits(path, prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_to_the_bit_in_any_step(
    family: str, dtype: str, isa: str, load_family: LoadFamily
) -> None:
    """Token by token, in chunks, beside others, over a cached prefix, on several threads."""
    _, model = load_family(family, dtype, isa=isa)
    assert isinstance(model.decoder, FusedDecoder)
    prompts = prompts_of(80, 64, 33)
    prompts[1][:41] = prompts[0][:41]
    alone = [PagedSequences(model, [prompt]) for prompt in prompts]
    for one in alone:
        one.finish(chunk=80)
    for threads, chunk in ((1, 1), (2, 7), (3, 40)):
        torch.set_num_threads(threads)
        try:
            together = PagedSequences(model, prompts, seed=chunk)
            together.step([(0, 45), (2, 1)])
            together.reuse(0, 1, 41)
            together.finish(chunk=chunk)
        finally:
            torch.set_num_threads(1)
        for one, logits in zip(alone, together.logits, strict=True):
            assert logits.equal(one.logits[0])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_through_modules(family: str, kv_dtype: KVDtype, load_family: LoadFamily) -> None:
    """What is written to the cache, and what comes out."""
    runs = []
    for how in (NATIVE, MODULES):
        _, model = load_family(family, "float32", how)
        run = PagedSequences(model, prompts_of(40), kv_dtype=kv_dtype)
        run.finish(chunk=13)
        runs.append(run)
    native, modules = runs
    torch.testing.assert_close(native.logits[0], modules.logits[0], atol=2e-3, rtol=0)
    if kv_dtype == "auto":
        assert native.tables == modules.tables
        torch.testing.assert_close(native.kv.data, modules.kv.data, atol=1e-5, rtol=1e-5)
