"""Attention by a list: equal to torch's for any mixture, and rows whose bits nothing around them changes.

In Triton's interpreter unless there is a CUDA device. Pieces and heads are small: the interpreter is slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests.model.attention_batches import Shape, make_batch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend import shared_prefix
from stemma.model.attend.attention import AttentionCall, Sight
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.latent import LatentProjection
from stemma.model.attend.paged import AttentionStep
from stemma.model.attend.shared_prefix import PrefixGroup
from stemma.model.cuda.attention_list import ListedRows, ListShape, make_list
from stemma.model.cuda.listed_attention import ListedAttentionStep, PieceRoom
from stemma.model.cuda.step_inputs import StepInputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
PIECE = 16


def attend(
    call: AttentionCall,
    batch: ForwardBatch,
    kv: DeviceKV,
    inputs: tuple[torch.Tensor, ...],
    *,
    num_padding: int = 0,
    num_programs: int = 2,
) -> torch.Tensor:
    """Attend in a step with padding behind its rows; return them all."""
    num_rows = len(batch.positions) + num_padding
    room = PieceRoom(num_programs // 2, PIECE)
    held = StepInputs(num_rows, kv.device, room.num_programs, 1 << 20)
    assert held.fill(batch, num_rows, kv)
    padded = [torch.cat([x, torch.ones_like(x[:1]).expand(num_padding, -1, -1)]) for x in inputs]
    return ListedAttentionStep(held, kv, room).attend(call, *padded)


def random_inputs(
    shape: Shape, num_tokens: int, dtype: torch.dtype, seed: int = 1
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=generator)
    new = torch.randn(2, num_tokens, shape.num_kv_heads, shape.head_dim, generator=generator)
    return query.to(DEVICE, dtype), *new.to(DEVICE, dtype)


def on_device(batch: ForwardBatch, kv: DeviceKV) -> tuple[ForwardBatch, DeviceKV]:
    other = DeviceKV(kv.layout, kv.num_blocks, DEVICE)
    other.data.copy_(kv.data)
    for name in ("token_ids", "positions", "slots", "logits_rows"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    return batch, other


SHAPES = (
    (Shape(4, 2, 16, block_size=8), torch.float32),
    (Shape(6, 2, 24, block_size=20), torch.bfloat16),
    (Shape(3, 3, 16, block_size=32), torch.float16),
)
SEQUENCE = st.tuples(st.integers(0, 50), st.sampled_from([1, 1, 1, 3, 20]))
"""Tokens behind, and queries."""


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.lists(SEQUENCE, min_size=1, max_size=4),
    st.sampled_from([None, 7, 24]),
    st.sampled_from([None, 5.0]),
    st.booleans(),
)
def test_equals_torch(
    setting: tuple[Shape, torch.dtype],
    sequences: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    """Any mixture of decodes, drafts, chunks and prompts: outputs, KV written, and padding of zeros."""
    shape, dtype = setting
    lens = [behind + queries for behind, queries in sequences]
    batch, kv = on_device(*make_batch(shape, lens, [queries for _, queries in sequences], 0, dtype))
    inputs = random_inputs(shape, len(batch.positions), dtype)
    sinks = torch.linspace(-1, 2, shape.num_heads, device=DEVICE) if has_sinks else None
    call = AttentionCall(0, shape.head_dim**-0.5, window, softcap, None, sinks=sinks)
    before = kv.data.clone()
    expected = AttentionStep(batch, kv).attend(call, *inputs)
    written = kv.data.clone()
    kv.data.copy_(before)
    output = attend(call, batch, kv, inputs, num_padding=3)
    torch.testing.assert_close(output[:-3], expected, atol=TOLERANCE[dtype], rtol=0)
    assert not output[-3:].any()
    assert torch.equal(kv.data, written)


@dataclass
class Known:
    """One sequence whose queries, keys and values are known, in blocks that may lie anywhere."""

    shape: Shape
    length: int
    window: int | None
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.inputs = random_inputs(self.shape, self.length, self.dtype, seed=7)
        self.call = AttentionCall(0, self.shape.head_dim**-0.5, self.window, None, None)

    def rows(self, cuts: list[int], others: list[tuple[int, int]], *, first: bool = True) -> torch.Tensor:
        """Compute all rows in steps that end at `cuts`, beside `others` (length, queries) in each."""
        lens = [length for length, _ in others]
        at = 0 if first else len(others)
        lens.insert(at, self.length)
        layout_of, kv = on_device(*make_batch(self.shape, lens, [1] * len(lens), 0, self.dtype))
        table, size = layout_of.block_tables[at], self.shape.block_size
        found = []
        for begin, end in zip([0, *cuts], [*cuts, self.length], strict=True):
            queries = [num for _, num in others]
            queries.insert(at, end - begin)
            step_lens = list(lens)
            step_lens[at] = end
            batch, _ = make_batch(self.shape, lens, queries, 0, self.dtype)
            batch.context_lens = step_lens
            own = slice(batch.query_starts[at], batch.query_starts[at + 1])
            positions = torch.arange(begin, end)
            batch.positions[own] = positions
            batch.slots[own] = table[positions // size].long() * size + positions % size
            inputs = random_inputs(self.shape, len(batch.positions), self.dtype, seed=end)
            for given_to, known in zip(inputs, self.inputs, strict=True):
                given_to[own] = known[begin:end]
            batch, _ = on_device(batch, kv)
            found.append(attend(self.call, batch, kv, inputs, num_programs=4)[own])
        return torch.cat(found)


@pytest.mark.parametrize("window", [None, pytest.param(21, marks=pytest.mark.slow)])
def test_bits_depend_on_nothing_around(window: int | None) -> None:
    """A prompt at once, in chunks, token by token behind what is cached, beside others and moved."""
    known = Known(Shape(2, 1, 16, block_size=8), 53, window)
    whole = known.rows([], [])
    ways = {
        "chunks": known.rows([20, 37], []),
        "decodes behind a prefix": known.rows([51, 52], []),
        "moved, behind others, in chunks": known.rows([31, 52], [(9, 9), (64, 1)], first=False),
    }
    for way, rows in ways.items():
        assert torch.equal(rows, whole), way


def test_bits_dont_depend_on_a_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes whose first blocks are the same: pieces read once for all have the bits of each one's own."""
    shape = Shape(4, 2, 16, block_size=8)
    batch, kv = on_device(*make_batch(shape, [80, 90, 70, 33], [1] * 4, 0, torch.bfloat16))
    batch.block_tables[1:3, :8] = batch.block_tables[0, :8]
    inputs = random_inputs(shape, 4, torch.bfloat16)
    call = AttentionCall(0, 0.25, None, None, None)
    apart = attend(call, batch, kv, inputs)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_KEYS", 16)
    assert shared_prefix.find_groups(batch, 8) == [PrefixGroup((0, 1, 2), 8)]
    assert torch.equal(attend(call, batch, kv, inputs), apart)
    expected = AttentionStep(batch, kv).attend(call, *inputs)
    torch.testing.assert_close(apart, expected, atol=3e-2, rtol=0)
    batch.block_tables[0, 0] = batch.block_tables[3, 0]  # now the members' first block isn't the same
    assert not torch.equal(attend(call, batch, kv, inputs)[0], apart[0])


@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [3, 1, 20, 1]])
def test_latents_equal_torch(queries: list[int]) -> None:
    """MLA, absorbed, with more heads than a tile has rows."""
    heads, nope, value_dim, rank, rope = 36, 16, 12, 32, 8
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(heads * (nope + value_dim), rank, generator=generator).to(DEVICE)
    latent = LatentProjection(weight, nope_dim=nope, rope_dim=rope, value_dim=value_dim)
    made, kv = make_batch(Shape(1, 1, rank + rope), [70, 40, 65, 1], queries, 2, torch.float32)
    kv_latent = DeviceKV(KVLayout(1, 1, 16, 1, rank + rope, "float32"), kv.num_blocks)
    kv_latent.data.copy_(kv.data[:, :, :1])
    batch, kv = on_device(made, kv_latent)
    num_tokens = len(batch.positions)
    query = torch.randn(num_tokens, heads, nope + rope, generator=generator).to(DEVICE)
    key = torch.randn(num_tokens, 1, rank + rope, generator=generator).to(DEVICE)
    call = AttentionCall(0, 0.2, None, None, latent)
    inputs = query, key, key[..., :rank]
    expected = AttentionStep(batch, kv).attend(call, *inputs)
    torch.testing.assert_close(attend(call, batch, kv, inputs), expected, atol=1e-3, rtol=1e-3)


def rows_of(queries: list[int], lens: list[int], groups: list[PrefixGroup] | None = None) -> ListedRows:
    starts = np.cumsum([0, *queries], dtype=np.int32)
    total = int(starts[-1]) + 2
    at = np.arange(len(lens), dtype=np.int32)
    return ListedRows(starts, np.array(lens, dtype=np.int32), at, 0, total, groups or [], 64)


SHAPE = ListShape(32, 8, 128, 64, 1024, Sight())
MIXES = st.lists(st.tuples(st.integers(0, 40_000), st.sampled_from([1, 1, 4, 700])), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(MIXES, st.sampled_from([None, 4096]), st.booleans())
def test_every_piece_of_every_row_is_listed_once(
    mix: list[tuple[int, int]], window: int | None, is_shared: bool
) -> None:
    """And no two leave their sums in the same place; the longest items come first."""
    queries, lens = [n for _, n in mix], [behind + n for behind, n in mix]
    members = tuple(seq for seq, (behind, n) in enumerate(mix) if n == 1 and behind >= 3000)
    groups = [PrefixGroup(members, 2500 // 64)] if is_shared and len(members) > 1 else []
    rows = rows_of(queries, lens, groups)
    shape = ListShape(32, 8, 128, 64, 1024, Sight(window=window))
    made = make_list(shape, rows, 264)
    order = np.concatenate([np.arange(rows.num_rows), rows.members])
    pieces = np.zeros((rows.starts[-1], -(-max(lens) // 1024)), dtype=int)
    places = np.zeros(shape.num_places, dtype=int)
    lengths = []
    for first, count, _table, begin, end, place in made.items.tolist():
        pieces[order[first : first + count], begin:end] += 1
        lengths.append(min(end * 1024, int(rows.seen[order[first : first + count]].max())) - begin * 1024)
        if place >= 0:
            assert end == begin + 1
            places[place : place + count * 32] += 1
    seen = rows.seen[: rows.starts[-1], None]
    first_seen = np.maximum(seen - window, 0) if window else 0 * seen
    numbers = np.arange(pieces.shape[1])
    needed = (numbers * 1024 < seen) & ((numbers + 1) * 1024 > first_seen)
    assert (pieces[needed] == 1).all()
    assert pieces.max() <= 1
    assert places.max() <= 1
    assert lengths == sorted(lengths, reverse=True)
    joined = {row: (parts[1], parts[4]) for row, *parts in made.joins.tolist()}
    assert {rows.num_rows - 2, rows.num_rows - 1} <= joined.keys()  # the padding


@pytest.mark.parametrize(
    ("mix", "most"),
    [
        ([(32_768, 32)], 1.25),
        ([(32_768, 1)], 1.25),
        ([(1024, 1)] * 64, 1.35),
        ([(0, 2048)], 1.25),
        ([(0, 8192)], 1.1),
        ([(32_768, 1), *[(1000, 1)] * 40], 1.4),
        ([(2000, 1)] * 64 + [(4096, 512)], 1.25),
    ],
    ids=["hit", "decode behind 32k", "64 decodes", "prompt", "long prompt", "skew", "mixed"],
)
def test_programs_end_together(mix: list[tuple[int, int]], most: float) -> None:
    """The program with most keys has little more than its share, or than one piece."""
    made = make_list(SHAPE, rows_of([n for _, n in mix], [c + n for c, n in mix]), 264)
    rows = rows_of([n for _, n in mix], [c + n for c, n in mix])
    work = []
    for first, count, _table, begin, end, _place in made.items.tolist():
        work += [min(end * 1024, int(rows.seen[first : first + count].max())) - begin * 1024] * SHAPE.units
    shares = [sum(work[program::264]) for program in range(264)]
    assert max(shares) <= max(most * sum(work) / 264, max(work))


def test_small_steps_dont_cut_what_long_ones_leave_whole() -> None:
    """One chunk behind 32k is cut for all programs; a prompt of 8,192 tokens keeps its sums in registers."""
    assert (make_list(SHAPE, rows_of([32], [32_800]), 264).items[:, 5] >= 0).all()
    assert (make_list(SHAPE, rows_of([8192], [8192]), 264).items[:, 5] < 0).all()
