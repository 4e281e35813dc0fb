"""Images under a fused decoder's kernels: vectors, positions of three axes and features as the CPU's step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests.model.cuda.rerun_recorder import FakeRecorder
from tests.model.cuda.small_fused import CPU, fused
from tests.vision_checkpoints import make_vision_checkpoint

from stemma.config.settings import ModelSettings
from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch, ImageRows
from stemma.model.cuda.fused_steps import FusedModel
from stemma.model.cuda.listed_attention import PieceRoom
from stemma.model.cuda.recorded_steps import RecordedDecoder
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.native.library import load_kernels

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="its models lie on the CPU"),
    pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler"),
]
AXES = torch.tensor([[0, 1, 1, 1, 3, 4, 5], [0, 1, 1, 2, 3, 4, 5], [0, 1, 2, 1, 3, 4, 5]])
"""Of a text, an image of two rows, in which one token is left out, and a text again."""


def steps_of(features: int) -> list[ForwardBatch]:
    """A prompt of five tokens with an image, then two decodes behind it."""
    generator, steps = torch.Generator().manual_seed(1), []
    for first, end in ((0, 5), (5, 6), (6, 7)):
        rows = torch.arange(first, end)
        images = None
        if first == 0:
            made = torch.randn(1 + features, 3, 64, generator=generator)
            images = ImageRows(torch.tensor([1, 2, 3]), made[0], made[1:] if features else None)
        steps.append(
            ForwardBatch(
                token_ids=rows + 5,
                positions=rows,
                slots=rows,
                query_starts=[0, end - first],
                context_lens=[end],
                block_tables=torch.zeros(1, 1, dtype=torch.int32),
                logits_rows=torch.arange(end - first),
                images=images,
                axes=AXES[:, first:end].contiguous(),
            )
        )
    return steps


def logits_of(model: CausalLM, features: int) -> torch.Tensor:
    kv = DeviceKV(model.layout(16), 1)
    return torch.cat([model.forward(batch, kv) for batch in steps_of(features)])


@pytest.mark.parametrize(("family", "features"), [("qwen2.5-vl", 0), ("qwen3-vl", 1), ("qwen3-vl", 2)])
def test_logits_are_those_of_the_cpu(family: str, features: int, tmp_path: Path) -> None:
    """Features behind one layer, and behind the last; decodes behind an image replay one recording."""
    path, recorder = make_vision_checkpoint(family, tmp_path), FakeRecorder()
    model = fused(path, steps=lambda one: RecordedDecoder(FusedModel(one, CPU), PieceRoom(1), recorder))
    own = logits_of(model, features)
    expected = logits_of(load_model(ModelSettings(path=path, device="cpu", dtype="float32")), features)
    torch.testing.assert_close(own, expected, atol=2e-4, rtol=1e-3)
    assert (recorder.num_recorded, recorder.num_replays) == (1, 1)
