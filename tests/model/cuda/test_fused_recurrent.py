"""Recurrent layers of a fused decoder in Triton's interpreter: transformers' logits, and bits of any cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests import hybrids
from tests.model.cuda.lone_columns import columns_are_alone  # noqa: F401 - used by itself
from tests.model.cuda.rerun_recorder import FakeRecorder
from tests.model.cuda.small_fused import CPU, SMALL, fused
from tests.model.paging import PagedSequences, plain_logits

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, StateLayout, StatePart
from stemma.model.attend.batch import ForwardBatch, StateMoves
from stemma.model.cuda import recorded_steps
from stemma.model.cuda.fused import LayoutDecoder
from stemma.model.cuda.fused_steps import FusedModel
from stemma.model.cuda.layers import OnDevice
from stemma.model.cuda.listed_attention import PieceRoom
from stemma.model.cuda.recorded_steps import RecordedDecoder
from stemma.model.cuda.state_list import HEADER, list_states
from stemma.model.families.layout import Linear
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.weights.named import NamedWeights
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight

LAYERS = ["linear_attention", "full_attention"]
TWO: dict[str, Any] = SMALL | {"num_hidden_layers": 2, "layer_types": LAYERS}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_next": {},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1]},
}
TOKENS = list(range(5, 14))
STATE = StateLayout((StatePart(0, "recurrent", (1, 4, 8)),))
NOTHING = torch.zeros(0, dtype=torch.int64)
PADDING = ForwardBatch(NOTHING, NOTHING, NOTHING, [0], [], torch.zeros(0, 0, dtype=torch.int32), NOTHING)


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
    """Has places for more states, and keeps some behind rows of a step, as the cache's checkpoints are."""

    def __init__(self, model: CausalLM, prompts: list[list[int]], num_kept: int) -> None:
        super().__init__(model, prompts)
        self.kv = DeviceKV(self.kv.layout, self.kv.num_blocks, num_states=len(prompts) + num_kept)
        self.kv.data.fill_(1e3)
        self.kept: tuple[tuple[int, int], ...] = ()
        """Rows of the next step, and where the states behind them go."""
        self.found: dict[int, int] = {}
        """Sequences that go on from a state of another number."""

    def _state_moves(self, plan: Any) -> StateMoves:
        moves = super()._state_moves(plan)
        initial = tuple(self.found.pop(seq, at) for (seq, _), at in zip(plan, moves.initial, strict=True))
        kept, self.kept = self.kept, ()
        return StateMoves(initial, moves.last, kept)

    def state(self, number: int) -> torch.Tensor:
        """All parts of a state."""
        assert self.kv.layout.state is not None
        return self.kv.state_part(number, 0, (self.kv.layout.state.num_bytes // 4,))


def run_in_pieces(model: CausalLM) -> Kept:
    """The tokens in chunks beside others, from a state kept within a chunk, and token by token."""
    run = Kept(model, [TOKENS, list(range(40, 46)), TOKENS, TOKENS], 2)
    run.kept = ((7, 4), (7, 5))  # behind its sixth token, to two places
    run.step([(1, 2), (0, 8)])
    run.reuse(0, 2, 6)
    run.found = {2: 5}
    run.step([(1, 1), (2, 1), (0, 1), (3, 1)])
    run.step([(2, 2), (1, 3), (3, 1)])
    for _ in TOKENS[2:]:
        run.step([(3, 1)])
    return run


def whole(model: CausalLM) -> Kept:
    run = Kept(model, [TOKENS], 1)
    run.kept = ((1, 1),)  # behind fewer tokens than the convolution sees
    run.step([(0, len(TOKENS))])
    return run


@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("granitemoehybrid", marks=pytest.mark.slow)])
def test_no_cut_and_no_batch_changes_a_rows_bits(family: str, tmp_path: Path) -> None:
    """Nor a state's; in bfloat16."""
    model = fused(checkpoint(family, tmp_path), torch.bfloat16)
    run, expected = run_in_pieces(model), whole(model)
    for seq in (0, 2, 3):
        assert torch.equal(run.logits[seq], expected.logits[0])
        assert torch.equal(run.state(seq), expected.state(0))
    assert torch.equal(run.state(4), run.state(5))
    assert not torch.equal(run.state(4), expected.state(0))


@pytest.mark.slow
def test_recorded_steps_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded to buckets, replayed with states in other places, and as they are."""
    monkeypatch.setattr(recorded_steps, "ROW_BUCKETS", (1, 4, 12))
    recorder, path = FakeRecorder(), checkpoint("granitemoehybrid", tmp_path)

    def recorded(decoder: LayoutDecoder, recorder: FakeRecorder | None) -> RecordedDecoder:
        return RecordedDecoder(FusedModel(decoder, CPU), PieceRoom(1, 16), recorder)

    run = run_in_pieces(fused(path, steps=partial(recorded, recorder=recorder)))
    expected = whole(fused(path, steps=partial(recorded, recorder=None)))
    assert recorder.num_recorded == 3
    assert recorder.num_replays > 3
    for seq in (0, 2, 3):
        assert torch.equal(run.logits[seq], expected.logits[0])
        assert torch.equal(run.state(seq), expected.state(0))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_lists_say_where_states_come_from_and_go(data: st.DataObject) -> None:
    """Of any number of sequences: each row, and for each sequence its stops in order, the last its end."""
    counts = data.draw(st.lists(st.integers(1, 5), max_size=5))
    starts = np.cumsum([0, *counts]).tolist()
    kv = DeviceKV(KVLayout(1, 2, 8, 1, 8, "float32", state=STATE), 4, num_states=40)
    initial = tuple(data.draw(st.none() | st.integers(0, 9)) for _ in counts)
    rows = sorted(data.draw(st.lists(st.integers(0, max(0, starts[-1] - 1)), max_size=4 if counts else 0)))
    moves = StateMoves(
        initial, tuple(range(10, 10 + len(counts))), tuple((row, 20 + n) for n, row in enumerate(rows))
    )
    batch = PADDING if not counts else replace(PADDING, query_starts=starts, states=moves)
    padded = starts[-1] + data.draw(st.integers(0, 3))
    listed = list_states(batch, padded, kv)
    of_rows, sequences = (listed[HEADER:][at * padded : end * padded] for at, end in ((0, 2), (2, 6)))
    stops = listed[HEADER + 6 * padded :].reshape(-1, 2).tolist()
    assert listed[0] == len(counts)

    def block(state: int | None) -> int:
        return -1 if state is None else kv.state_blocks(state).start

    expected = [(n, block(initial[seq])) for seq, count in enumerate(counts) for n in range(count)]
    assert of_rows.reshape(-1, 2).tolist() == [list(one) for one in expected] + [[-1, -1]] * (
        padded - len(expected)
    )
    for seq, (first, before, begin, end) in enumerate(sequences.reshape(-1, 4)[: len(counts)].tolist()):
        last = starts[seq + 1]
        kept = [[row + 1, block(state)] for row, state in moves.snapshots if starts[seq] <= row < last]
        assert (first, before) == (starts[seq], block(initial[seq]))
        assert stops[begin:end] == [*kept, [last, block(moves.last[seq])]]


def test_outputs_of_codes_come_in_order() -> None:
    """As a family's layout orders them: codes of 4 bits, biases."""
    weight = QuantizedWeight(
        torch.randint(0, 16, (6, 32), dtype=torch.int8, generator=torch.Generator().manual_seed(0)),
        torch.rand(6, 1) + 0.5,
        torch.full((6, 1), 8, dtype=torch.int8),
        4,
        32,
        ActivationScheme.NONE,
        is_unsigned=True,
    )
    linear, order, x = Linear("a", 6, 32, has_bias=True), (4, 0, 5, 1, 3, 2), torch.ones(2, 32)
    names: dict[str, Any] = {"a.weight": weight, "a.bias": torch.arange(6.0)}
    load = OnDevice(NamedWeights(names, torch.float32, lambda _name, _tensor: None), torch.float32, CPU)
    assert torch.equal(load.product(linear, order=order)(x).join(), load.product(linear)(x).join()[:, order])
