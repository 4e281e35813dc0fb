"""Tokens that a query sees, chosen in native code: those that torch chooses, at every level."""

from __future__ import annotations

import pytest
import torch

from stemma.memory.device.kv import TORCH_DTYPES, DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.selection import Selection, TokenScores, choose
from stemma.model.cpu.selection import select
from stemma.native.library import load_kernels
from tests.native.isa import level_params

BLOCK, LATENT = 8, 12
LENGTHS = (37, 5, 150)
"""Tokens of the sequences; the last 20, or all, are queries."""


def batch_of(tables: torch.Tensor) -> ForwardBatch:
    starts = [0, *torch.tensor([min(length, 20) for length in LENGTHS]).cumsum(0).tolist()]
    none = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(none, none, none, starts, list(LENGTHS), tables, none)


def numbers(most: int, *shape: int) -> torch.Tensor:
    """Small whole numbers over a power of two: their sums are never rounded, in whatever order."""
    return torch.randint(-most, most + 1, shape) / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("most", [1, 8], ids=["many are equal", "few are equal"])
@pytest.mark.parametrize(("heads", "dim", "top_k"), [(12, 20, 16), (33, 7, 1), (4, 16, 300)])
@pytest.mark.parametrize("isa", level_params(emulated=False))
def test_chosen_tokens(isa: str, heads: int, dim: int, top_k: int, most: int, dtype: str) -> None:
    torch.manual_seed(0)
    kv = DeviceKV(KVLayout(2, 1, BLOCK, 1, LATENT + dim, dtype), 40)
    kv.data.copy_(numbers(most, *kv.data.shape).to(TORCH_DTYPES[dtype]))
    tables = torch.zeros(len(LENGTHS), 20, dtype=torch.int32)
    free = torch.randperm(40, dtype=torch.int32)
    for number, length in enumerate(LENGTHS):
        count = -(-length // BLOCK)
        tables[number, :count], free = free[:count], free[count:]
    batch = batch_of(tables)
    rows = batch.query_starts[-1]
    scoring = TokenScores(numbers(most, rows, heads, dim), numbers(most, rows, heads))
    selection = Selection(top_k, dim, scoring)
    kernels = load_kernels(isa)
    assert kernels is not None
    places, counts = select(kernels, selection, 1, batch, kv)
    rows_of_a_block = kv.block_stride // kv.token_stride
    for number, length in enumerate(LENGTHS):
        queries = slice(*batch.query_starts[number : number + 2])
        used = tables[number, : -(-length // BLOCK)].to(torch.int64)
        keys = kv.layer(1)[used, 0].flatten(0, 1)[:length, 0]
        for row, wanted in enumerate(choose(selection, queries, keys), start=queries.start):
            found = [
                int(used[position // BLOCK]) * rows_of_a_block + position % BLOCK
                for position in wanted.nonzero()[:, 0].tolist()
            ]
            assert places[row, : counts[row]].tolist() == found
