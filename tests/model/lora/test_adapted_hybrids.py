"""Adapters of models with recurrent layers and sparse attention: PEFT's logits, same bits in any batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests import hybrids
from tests.adapters import ATTENTION, GATED, build_adapter, merged_logits
from tests.model.conftest import MODULES, NATIVE, TORCH
from tests.model.paging import PagedSequences, plain_logits

from stemma.config.settings import ModelSettings
from stemma.model.load import loading
from stemma.model.load.loading import load_model
from stemma.model.lora.reading import read_adapter
from stemma.model.opened.causal_lm import CausalLM
from stemma.native.library import load_kernels

pytest.importorskip("peft", reason="PEFT is the oracle")

DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    "qwen3_next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "qwen3_5_text": (*ATTENTION, *GATED, *DELTA),
    "granitemoehybrid": (*ATTENTION, "in_proj", "out_proj", "input_linear"),
    "bamba": (*ATTENTION, *GATED, "in_proj", "out_proj"),
    "kimi_linear": ("q_proj", "o_proj"),
    "falcon_h1": (*ATTENTION, *GATED, "in_proj"),
    "lfm2": ("q_proj", "k_proj", "v_proj", "w1", "w2", "w3", "in_proj", "out_proj"),
    "jamba": (*ATTENTION, "in_proj", "out_proj"),
    "mamba2": ("in_proj",),
    "deepseek_v32": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "wq_b", "wk"),
    "deepseek_v4": ("q_a_proj", "q_b_proj", "kv_proj", "gate_proj", "o_b_proj"),
}
"""What an adapter of each family may touch; PEFT makes none for `out_proj` of Mamba and Falcon-H1."""
IN_ONE_CALL = ("qwen3_next", "qwen3_5_text", "granitemoehybrid", "bamba")
TOKENS = [random.Random(0).randrange(3, 500) for _ in range(45)]


def load(path: Path, way: str, dtype: str) -> CausalLM:
    with pytest.MonkeyPatch.context() as patch:
        if way != NATIVE:
            patch.setattr(loading, "fitting_layout", lambda _checkpoint: None)
        if way == TORCH:
            patch.setattr(loading, "load_kernels", lambda _isa: None)
        return load_model(ModelSettings.model_validate({"path": path, "device": "cpu", "dtype": dtype}))


def logits_with(model: CausalLM, adapter: object | None, tokens: list[int], chunk: int) -> torch.Tensor:
    run = PagedSequences(model, [tokens], adapters=[adapter])
    run.finish(chunk)
    return run.logits[0]


def ways_of(family: str) -> tuple[str, ...]:
    if load_kernels() is None:
        return (TORCH,)
    return (NATIVE, MODULES) if family in IN_ONE_CALL else (NATIVE, TORCH)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way"), [(f, way) for f in TARGETS for way in ways_of(f)])
def test_equal_to_merged_in_float32(family: str, way: str, tmp_path: Path) -> None:
    checkpoint = hybrids.build(family, tmp_path / "model")
    path = build_adapter(checkpoint, tmp_path / "adapter", TARGETS[family])
    expected = merged_logits(checkpoint, path, TOKENS)
    assert (expected - plain_logits(checkpoint, TOKENS)).abs().max() > 0.05  # it does something
    model = load(checkpoint, way, "float32")
    adapter = model.prepare_adapter(read_adapter(path, model.adaptable, max_rank=64))
    found = logits_with(model, adapter, TOKENS, 17)
    torch.testing.assert_close(found, expected, atol=3e-5 * float(expected.abs().max()), rtol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "family", ["qwen3_next", "granitemoehybrid", "lfm2", "mamba2", "deepseek_v32", "deepseek_v4"]
)
def test_adapters_in_one_batch(family: str, tmp_path: Path) -> None:
    """Alone, beside others and without adapter: the same bits."""
    checkpoint = hybrids.build(family, tmp_path / "model")
    model = load(checkpoint, NATIVE, "bfloat16")
    few = TARGETS[family][-1:]
    adapters: list[object | None] = [None]
    for seed, (targets, rank) in enumerate([(TARGETS[family], 5), (few, 20)]):
        path = build_adapter(checkpoint, tmp_path / str(seed), targets, seed=seed, rank=rank)
        adapters.append(model.prepare_adapter(read_adapter(path, model.adaptable, max_rank=64)))
    chosen = [adapters[number] for number in (0, 1, 2, 1, 0)]
    prompts = [[random.Random(n).randrange(3, 500) for _ in range(20 + 31 * n)] for n in range(len(chosen))]
    alone = [logits_with(model, a, p, chunk=len(p)) for a, p in zip(chosen, prompts, strict=True)]
    for threads, chunk in ((1, 7), (2, 64)):
        torch.set_num_threads(threads)
        try:
            together = PagedSequences(model, prompts, adapters=chosen)
            together.finish(chunk)
        finally:
            torch.set_num_threads(1)
        for one, other in zip(alone, together.logits, strict=True):
            assert one.equal(other)
