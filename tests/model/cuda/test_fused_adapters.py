"""Adapters on a fused decoder: PEFT's logits, rows of several in one recording, bits equal to alone."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")
pytest.importorskip("peft", reason="PEFT is the oracle")

from tests import checkpoints, hybrids
from tests.adapters import ATTENTION, GATED, build_adapter, merged_logits
from tests.model.cuda.lone_columns import columns_are_alone  # noqa: F401 - used by itself
from tests.model.cuda.rerun_recorder import FakeRecorder
from tests.model.cuda.small_fused import CPU, FAMILIES, SMALL, fused
from tests.model.paging import PagedSequences, plain_logits

from stemma.model.cuda.fused import LayoutDecoder
from stemma.model.cuda.fused_steps import FusedModel
from stemma.model.cuda.listed_attention import PieceRoom
from stemma.model.cuda.recorded_steps import RecordedDecoder
from stemma.model.lora.reading import read_adapter
from stemma.model.opened.causal_lm import CausalLM

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *GATED)
DELTA = (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj")
TARGETS = {
    **{"llama": (*ATTENTION, *GATED), "gemma3": (*ATTENTION, *GATED)},
    **{"deepseek-v3": LATENT, "qwen3_next": DELTA},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
}
"""Whose inputs are joined in an order of their own."""


def recorded(decoder: LayoutDecoder, recorder: FakeRecorder | None = None) -> RecordedDecoder:
    return RecordedDecoder(FusedModel(decoder, CPU), PieceRoom(1, 16), recorder)


def adapted(model: CausalLM, path: Path) -> object:
    return model.prepare_adapter(read_adapter(path, model.adaptable, max_rank=64))


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma3", "deepseek-v3", "qwen3_next"))],
)
def test_logits_are_those_of_the_merged_model(family: str, tmp_path: Path) -> None:
    build = hybrids.build if family in HYBRIDS else checkpoints.build
    path = build(family, tmp_path / "model", **SMALL | (FAMILIES | HYBRIDS).get(family, {}))
    adapter, tokens = build_adapter(path, tmp_path / "adapter", TARGETS[family], rank=5), [5, 6, 7, 8]
    expected = merged_logits(path, adapter, tokens)
    assert (expected - plain_logits(path, tokens)).abs().max() > 0.02  # it does something
    model = fused(path, steps=recorded)
    run = PagedSequences(model, [tokens], adapters=[adapted(model, adapter)])
    run.step([(0, 3)])
    run.step([(0, 1)])
    torch.testing.assert_close(run.logits[0], expected, atol=3e-4, rtol=1e-3)


@pytest.mark.one_in(3)
def test_rows_of_several_adapters_have_the_bits_of_each_alone(tmp_path: Path) -> None:
    """Of other ranks and products, beside rows without one; recorded, in bfloat16, in chunks."""
    fields = SMALL | {"num_hidden_layers": 1, "hidden_size": 128}
    path, recorder = checkpoints.build("llama", tmp_path / "model", **fields), FakeRecorder()
    model = fused(path, torch.bfloat16, partial(recorded, recorder=recorder))
    made: list[object | None] = [None]
    for seed, (targets, rank) in enumerate([((*ATTENTION, *GATED), 4), (("o_proj", "up_proj"), 20)]):
        adapter = build_adapter(path, tmp_path / str(seed), targets, seed=seed, rank=rank)
        made.append(adapted(model, adapter))
    chosen = [made[number] for number in (0, 1, 2)]
    prompts = [[random.Random(n).randrange(3, 500) for _ in range(3 + n % 2)] for n in range(len(chosen))]
    together = PagedSequences(model, prompts, adapters=chosen)
    together.finish(2)
    assert recorder.num_recorded > 0
    for number, prompt in enumerate(prompts):
        alone = PagedSequences(model, [prompt], adapters=[chosen[number]])
        alone.finish(len(prompt))
        assert torch.equal(alone.logits[0], together.logits[number]), number
    same = PagedSequences(model, [prompts[1]])
    same.finish(9)
    assert not torch.equal(same.logits[0], together.logits[1])
