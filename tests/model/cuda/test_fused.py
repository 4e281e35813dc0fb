"""A layout's fused decoder in Triton's interpreter: transformers' logits, and bits that no batch changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests import checkpoints
from tests.model.cuda.rerun_recorder import FakeRecorder
from tests.model.cuda.small_fused import CPU, FAMILIES, SMALL, fused
from tests.model.edited_checkpoints import fp8_checkpoint
from tests.model.paging import PagedSequences, plain_logits
from tests.quantized_files import gptq, rewrite

from stemma.model.cuda.fused_steps import FusedModel
from stemma.model.cuda.listed_attention import PieceRoom
from stemma.model.cuda.recorded_steps import RecordedDecoder
from stemma.model.families.layout import Linear
from stemma.model.weights.named import Affine, NamedWeights


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.slow] * (f in ("qwen3", "deepseek-v2"))) for f in FAMILIES],
)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = checkpoints.build(family, tmp_path, **SMALL | FAMILIES[family])
    tokens = list(range(5, 10))
    run = PagedSequences(fused(path), [tokens])
    run.step([(0, 3)])
    run.step([(0, 2)])
    torch.testing.assert_close(run.logits[0], plain_logits(path, tokens), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3-moe", "deepseek-v3"))]
)
def test_no_batch_changes_a_rows_bits(family: str, tmp_path: Path) -> None:
    """Whole, in chunks, behind another's blocks, decoded, moved beside other rows; in bfloat16."""
    fields = SMALL | FAMILIES.get(family, {}) | {"num_hidden_layers": 1, "hidden_size": 128}
    if family == "deepseek-v3":
        fields["first_k_dense_replace"] = 0
    model = fused(checkpoints.build(family, tmp_path, **fields), torch.bfloat16)
    tokens, other = list(range(5, 10)), list(range(40, 44))
    whole = PagedSequences(model, [tokens])
    whole.step([(0, 5)])
    run = PagedSequences(model, [tokens, other, tokens])
    run.step([(1, 2), (0, 3)])
    run.reuse(0, 2, 3)
    run.step([(2, 1), (1, 2), (0, 2)])
    run.step([(2, 1)])
    assert torch.equal(run.logits[0], whole.logits[0])
    assert torch.equal(run.logits[2], whole.logits[0])


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_quantized_weights_are_multiplied_as_codes(family: str, tmp_path: Path) -> None:
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    twin = rewrite(tmp_path, gptq(4, 32, zero=True), {"quantization_config": fields}, family=family)
    tokens = [5, 6, 7]
    run = PagedSequences(fused(twin.quantized), [tokens])
    run.step([(0, 3)])
    torch.testing.assert_close(run.logits[0], plain_logits(twin.plain, tokens), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "block"),
    [
        ("llama", (16, 24)),
        *(pytest.param("deepseek-v3", b, marks=pytest.mark.slow) for b in (None, (16, 24))),
    ],
)
def test_fp8_weights_are_multiplied_as_codes(
    family: str, block: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what their numbers give; no product asks for these."""
    fp8_checkpoint(tmp_path, block, partial(checkpoints.build, family, **SMALL | FAMILIES.get(family, {})))
    plain = PagedSequences(fused(tmp_path / "plain"), [[5, 6, 7]])
    asked, affine = set(), NamedWeights.affine

    def watched(weights: NamedWeights, linear: Linear) -> Affine:
        asked.add(linear.name)
        return affine(weights, linear)

    monkeypatch.setattr(NamedWeights, "affine", watched)
    run = PagedSequences(fused(tmp_path / "fp8"), [[5, 6, 7]])
    for one in (run, plain):
        one.step([(0, 3)])
    assert torch.equal(run.logits[0], plain.logits[0])
    assert asked == {"lm_head"}


def test_steps_attend_by_the_list(tmp_path: Path) -> None:
    """The whole of it: chunk and decodes through the kernels that a card records, equal to the bit."""
    path = checkpoints.build("qwen2", tmp_path, **SMALL)
    recorder, room = FakeRecorder(), PieceRoom(1)
    model = fused(path, steps=lambda decoder: RecordedDecoder(FusedModel(decoder, CPU), room, recorder))
    tokens = list(range(5, 10))
    run = PagedSequences(model, [tokens, tokens[:3]])
    run.step([(0, 4), (1, 1)])
    run.step([(1, 2), (0, 1)])
    assert recorder.num_recorded == 2
    torch.testing.assert_close(run.logits[0], plain_logits(path, tokens), atol=2e-4, rtol=1e-3)
    assert torch.equal(run.logits[1], run.logits[0][:3])


def test_rows_that_want_no_logits_get_none(tmp_path: Path) -> None:
    path = checkpoints.build("qwen2", tmp_path, **SMALL)
    model = fused(path)
    run = PagedSequences(model, [[5, 6, 7]])
    assert run.step([(0, 2)], wanted=[]).shape == (0, model.vocab_size)
    last = run.step([(0, 1)], wanted=[0])
    torch.testing.assert_close(last, plain_logits(path, [5, 6, 7])[2:], atol=2e-4, rtol=1e-3)
