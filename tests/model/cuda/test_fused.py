"""The fused decoder of a layout, in Triton's interpreter: transformers' logits, and bits that no batch changes."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests.model.cuda.row_attention import RowReader
from tests.model.paging import PagedSequences, plain_logits

from stemma.config.settings import ModelSettings
from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cuda.fused import LayoutDecoder
from stemma.model.cuda.layers import LayerStep, Reader
from stemma.model.load.fused_loading import fitting_layout, named_weights
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.opened.checkpoint import open_checkpoint
from stemma.model.opened.checkpoint_config import describe_checkpoint

MakeReader = Callable[[ForwardBatch, DeviceKV], Reader]


class Stepping(LayoutDecoder):
    """With attention chosen by the test."""

    make_reader: MakeReader = RowReader

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        return self.run(batch, LayerStep(self.make_reader(batch, kv), kv))


def fused(path: Path, reference: CausalLM, dtype: torch.dtype) -> CausalLM:
    """The model of `path` with the fused decoder."""
    settings = ModelSettings.model_validate({"path": path, "dtype": str(dtype).removeprefix("torch.")})
    checkpoint = open_checkpoint(settings, describe_checkpoint(settings).config)
    layout = fitting_layout(checkpoint)
    assert layout is not None
    model = copy(reference)
    model.decoder = Stepping(
        layout, named_weights(checkpoint), dtype, torch.device("cpu"), max_positions=2048
    )
    return model


FAMILIES = ("qwen2", "qwen3", "smollm3", "gemma3", "qwen3-moe", "deepseek-v3", "gpt-oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, load_family) -> None:
    path, reference = load_family(family, "float32")
    tokens = list(range(5, 18))
    run = PagedSequences(fused(path, reference, torch.float32), [tokens])
    run.step([(0, 9)])
    run.finish(4)
    torch.testing.assert_close(run.logits[0], plain_logits(path, tokens), atol=2e-4, rtol=1e-3)
