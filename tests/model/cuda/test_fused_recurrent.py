"""Recurrent layers of a fused decoder in Triton's interpreter: transformers' logits, and bits of any cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests import hybrids
from tests.model.cuda.rerun_recorder import FakeRecorder
from tests.model.cuda.small_fused import CPU, SMALL, fused
from tests.model.paging import PagedSequences, plain_logits

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, StateLayout, StatePart
from stemma.model.attend.batch import ForwardBatch, StateMoves
from stemma.model.cpu.fused import FusedDecoder, pack_weights
from stemma.model.cuda import recorded_steps
from stemma.model.cuda.fused import LayoutDecoder
from stemma.model.cuda.fused_steps import FusedModel
from stemma.model.cuda.listed_attention import PieceRoom
from stemma.model.cuda.recorded_steps import RecordedDecoder
from stemma.model.cuda.state_list import HEADER, list_states
from stemma.model.opened.causal_lm import CausalLM

LAYERS = ["linear_attention", "full_attention"]
TWO: dict[str, Any] = SMALL | {"num_hidden_layers": 2, "layer_types": LAYERS}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_next": {},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1]},
}
TOKENS = list(range(5, 14))


def checkpoint(family: str, path: Path, **fields: Any) -> Path:
    fields = TWO | FAMILIES[family] | fields
    if family == "bamba":
        del fields["layer_types"]
    return hybrids.build(family, path, **fields)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f in ("qwen3_next", "bamba"))) for f in FAMILIES]
)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """In two chunks, of which the second is shorter than the convolution."""
    path = checkpoint(family, tmp_path)
    run = PagedSequences(fused(path), [TOKENS])
    run.step([(0, 7)])
    run.step([(0, 2)])
    torch.testing.assert_close(run.logits[0], plain_logits(path, TOKENS), atol=2e-4, rtol=1e-3)


class Kept(PagedSequences):
    """Keeps a state behind each row asked for, as checkpoints of the cache are kept."""

    def __init__(self, model: CausalLM, prompts: list[list[int]], num_kept: int) -> None:
        super().__init__(model, prompts)
        self._shared = self.kv.num_states
        self.kept: list[tuple[int, int]] = []
        """Rows of the next step, and states."""
        layout, blocks = self.kv.layout, self.kv.num_blocks
        self.kv = DeviceKV(layout, blocks, num_states=len(prompts) + num_kept)
        self.kv.data.fill_(1e3)

    def resume(self, source: int, target: int, num_tokens: int, state: int) -> None:
        """Let `target` go on behind the tokens of `source` that `state` was kept behind."""
        self.reuse(source, target, num_tokens)
        self.initial = {target: state}

    def _state_moves(self, plan: Any) -> StateMoves:
        moves, found = super()._state_moves(plan), getattr(self, "initial", {})
        initial = tuple(
            found.pop(seq, at) if at is not None else None
            for (seq, _), at in zip(plan, moves.initial, strict=True)
        )
        kept, self.kept = tuple(self.kept), []
        return StateMoves(initial, moves.last, kept)


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
def test_no_cut_and_no_batch_changes_a_rows_bits(family: str, tmp_path: Path) -> None:
    """Whole, in chunks, token by token beside other rows, and from a state kept within a chunk; bfloat16."""
    model = fused(checkpoint(family, tmp_path), torch.bfloat16)
    other = list(range(40, 46))
    whole = Kept(model, [TOKENS], 1)
    whole.kept = [(1, 1)]  # fewer tokens than the convolution sees
    whole.step([(0, 9)])
    run = Kept(model, [TOKENS, other, TOKENS, TOKENS], 2)
    run.kept = [(7, 4), (7, 5)]
    run.step([(1, 2), (0, 8)])  # behind its sixth token, to two places
    run.resume(0, 2, 6, 5)
    run.step([(1, 1), (2, 1), (0, 1), (1, 0)][:3])
    run.step([(2, 2), (1, 3)])
    for _ in TOKENS:
        run.step([(3, 1)])
    for seq in (0, 2, 3):
        assert torch.equal(run.logits[seq], whole.logits[0])
    states = [run.kv.state_part(seq, 0, (run.kv.layout.state.num_bytes // 4,)) for seq in (0, 2, 3)]
    ended = whole.kv.state_part(0, 0, (len(states[0]),))
    assert all(torch.equal(state, ended) for state in states)
