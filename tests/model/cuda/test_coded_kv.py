"""KV in int8 and fp8 under a fused decoder's kernels: the CPU's bytes, and bits that no batch changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests import checkpoints
from tests.model.cuda.small_fused import CPU, FAMILIES, SMALL, fused
from tests.model.paging import PagedSequences, coded_logits

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.kv_format import KVRows
from stemma.model.cuda.coded_kv import rows_of, stored_constants
from stemma.model.cuda.fused_steps import FusedModel
from stemma.model.cuda.layer_kernels import prepare_heads
from stemma.model.cuda.listed_attention import PieceRoom
from stemma.model.cuda.recorded_steps import RecordedDecoder

HEADS, DIM, SIZE = 3, 20, 4
Code: TypeAlias = Literal["int8", "fp8"]
STORED: list[Code] = ["int8", "fp8"]
NUMBER = st.one_of(
    st.floats(-1e4, 1e4, width=32),
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, -0.0, 1e-38, -1e-31, 3e38, float("inf"), float("-inf"), float("nan")]),
)


def layout_of(dtype: torch.dtype, stored: Code) -> KVLayout:
    return KVLayout(1, 2, SIZE, HEADS, DIM, str(dtype).removeprefix("torch."), stored=stored)


def write(kv: DeviceKV, slots: torch.Tensor, made: torch.Tensor) -> None:
    """Keys and values as a product leaves them, [T, (1 + 2 * HEADS) * DIM], one query head before them."""
    cache, count = rows_of(kv, 0), len(made)
    query = torch.empty(count, 1, DIM, dtype=made.dtype)
    kernel: Any = prepare_heads[(count, 1 + 2 * HEADS)]
    kernel(
        *(made, made, query, query, made, slots, slots, slots, query, cache),
        *(made.numel(), made.shape[1], 1, HEADS, 1, 0, 0.0, *cache.stride()[:4]),
        **{"BLOCK_SIZE": SIZE, "PIECES": 1, "HAS_BIAS": False, "DIM": DIM, "ROTARY": 0, "HAS_AXES": False},
        **{"NORMS": False, "IN_FLOATS": False, "BLOCK": 32},
        **stored_constants(kv.layout),
    )


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(STORED),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.lists(NUMBER, min_size=2 * HEADS * DIM, max_size=2 * HEADS * DIM),
    st.integers(0, 2**16),
)
def test_bytes_are_those_of_the_cpu(
    stored: Code, dtype: torch.dtype, hostile: list[float], seed: int
) -> None:
    """Ordinary rows, zeros, the smallest, the largest, what isn't finite; a row that is padding."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(4, (1 + 2 * HEADS) * DIM, generator=generator) * 10.0 ** torch.arange(-2, 2)[:, None]
    made[1, DIM:] = torch.tensor(hostile)
    made, slots = made.to(dtype), torch.tensor([6, 1, -1, 3])
    ours, theirs = (DeviceKV(layout_of(dtype, stored), 2) for _ in range(2))
    write(ours, slots, made)
    written = slots >= 0
    for part in range(2):
        rows = made[written, DIM:].view(-1, 2, HEADS, DIM)[:, part]
        KVRows(theirs, 0, part, DIM).write(slots[written] // SIZE, slots[written] % SIZE, rows)
    assert torch.equal(ours.data, theirs.data)


def by_list(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    room = PieceRoom(1, 16)
    return fused(path, dtype, lambda decoder: RecordedDecoder(FusedModel(decoder, CPU), room, None))


@pytest.mark.parametrize("stored", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen2", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_models_read_what_they_wrote(family: str, stored: Code, tmp_path: Path) -> None:
    """Codes of rows as plain KV has them; logits of transformers over codes, or of torch."""
    path = checkpoints.build(family, tmp_path, **SMALL | FAMILIES[family])
    tokens = list(range(5, 10))
    model = by_list(path)
    run, plain = PagedSequences(model, [tokens], kv_dtype=stored), PagedSequences(model, [tokens])
    for one in (run, plain):
        one.step([(0, 3)])
        one.step([(0, 2)])
    copy, layout = DeviceKV(run.kv.layout, run.kv.num_blocks), plain.kv.layout
    blocks = torch.tensor(run.tables[0])
    for part in range(layout.num_parts):
        rows = plain.kv.layer(0)[plain.tables[0]][:, part].flatten(0, 1)[: len(tokens)]
        at = torch.arange(len(tokens))
        size = layout.block_size
        KVRows(copy, 0, part, layout.head_dim).write(blocks[at // size], at % size, rows)
        written = run.kv.layer(0)[blocks[at // size], part, at % size]
        assert torch.equal(written, copy.layer(0)[blocks[at // size], part, at % size])
    expected = coded_logits(path, tokens, stored)
    if family != "qwen2":
        by_rows = PagedSequences(fused(path), [tokens], kv_dtype=stored)
        by_rows.step([(0, 5)])
        expected = by_rows.logits[0]
    torch.testing.assert_close(run.logits[0], expected, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("stored", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_no_batch_changes_a_rows_bits(stored: Code, tmp_path: Path) -> None:
    """Whole, in chunks, behind another's blocks, decoded beside others; in bfloat16."""
    path = checkpoints.build("qwen2", tmp_path, **SMALL | {"num_hidden_layers": 2, "hidden_size": 64})
    model, tokens = by_list(path, torch.bfloat16), list(range(5, 10))
    whole = PagedSequences(model, [tokens], kv_dtype=stored)
    whole.step([(0, 5)])
    run = PagedSequences(model, [tokens, [40, 41], tokens], kv_dtype=stored)
    run.step([(1, 1), (0, 3)])
    run.reuse(0, 2, 3)
    run.step([(2, 1), (1, 1), (0, 2)])
    run.step([(2, 1)])
    assert torch.equal(run.logits[0], whole.logits[0])
    assert torch.equal(run.logits[2], whole.logits[0])
