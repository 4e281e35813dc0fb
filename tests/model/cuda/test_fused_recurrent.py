"""Recurrent layers of a fused decoder in Triton's interpreter: transformers' logits, and bits of any cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests import hybrids
from tests.model.cuda.rerun_recorder import FakeRecorder
from tests.model.cuda.small_fused import CPU, SMALL, fused
from tests.model.paging import PagedSequences, plain_logits

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch, StateMoves
from stemma.model.cuda import recorded_steps
from stemma.model.cuda.fused_steps import FusedModel
from stemma.model.cuda.listed_attention import PieceRoom
from stemma.model.cuda.recorded_steps import RecordedDecoder
from stemma.model.cuda.state_list import HEADER, list_states

LAYERS = ["linear_attention", "full_attention"]
TWO: dict[str, Any] = SMALL | {"num_hidden_layers": 2, "layer_types": LAYERS}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_next": {},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "bamba": {"mamba_n_heads": 4},
}
TOKENS = list(range(5, 14))


def checkpoint(family: str, path: Path) -> Path:
    fields = TWO | FAMILIES[family]
    if family == "bamba":
        fields = {**fields, "attn_layer_indices": [1]}
        del fields["layer_types"]
    return hybrids.build(family, path, **fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """In two chunks, of which the second is shorter than the convolution."""
    path = checkpoint(family, tmp_path)
    run = PagedSequences(fused(path), [TOKENS])
    run.step([(0, 7)])
    run.step([(0, 2)])
    torch.testing.assert_close(run.logits[0], plain_logits(path, TOKENS), atol=2e-4, rtol=1e-3)
