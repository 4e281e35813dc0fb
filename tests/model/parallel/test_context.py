"""Context parallel attention on ranks that are threads, beside attention over whole sequences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.paged import AttentionStep
from stemma.model.parallel.context import ContextStep
from stemma.model.parallel.dealing import Dealing, DealtStep, Sizes
from stemma.model.parallel.partial import NativePartials, PartialAttention, TorchPartials
from stemma.model.parallel.share import Share
from stemma.native.library import load_kernels
from tests.native.isa import level_params

HEADS, KV_HEADS, DIM = 6, 2, 16
QUERIES_TRAVEL, KEYS_TRAVEL = Sizes(row=0, block=1), Sizes(row=1, block=0)
WHOLE = AttentionCall(0, 0.25, None, None, None)
CALLS = (
    WHOLE,
    replace(WHOLE, sliding_window=19),
    replace(WHOLE, softcap=4.0, sinks=torch.linspace(-1, 2, HEADS)),
    replace(WHOLE, first_key=5),
)


class Board:
    """Where ranks that are threads leave what they send."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60.0)
        self.sent: list[Any] = [None] * size


@dataclass
class Arrived:
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


class ThreadGroup:
    """The part of `RankGroup` that attention uses."""

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self.share = Share(0, 1, context_rank=rank, context_size=size)
        self._board = board

    def _swap(self, own: Any) -> list[Any]:
        self._board.sent[self.share.context_rank] = own
        self._board.barrier.wait()
        everything = list(self._board.sent)
        self._board.barrier.wait()
        return everything

    def exchange(self, parts: Sequence[torch.Tensor], num_rows: Sequence[int]) -> list[torch.Tensor]:
        received = [sent[self.share.context_rank] for sent in self._swap(list(parts))]
        assert [len(one) for one in received] == list(num_rows)
        return received

    def pass_on(self, tensor: torch.Tensor) -> Arrived:
        return Arrived(self._swap(tensor)[self.share.context_rank - 1])


def batch_of(lengths: Sequence[tuple[int, int]], block_size: int) -> ForwardBatch:
    """Sequences of so many tokens, of which the last so many are new; blocks in mixed order."""
    needs = [-(-length // block_size) for length, _ in lengths]
    drawn_blocks = torch.randperm(sum(needs), generator=torch.Generator().manual_seed(1))
    blocks = torch.split(drawn_blocks, needs)
    tables = torch.zeros(len(lengths), max(needs), dtype=torch.int32)
    slots, positions, starts = [], [], [0]
    for seq, (length, new) in enumerate(lengths):
        tables[seq, : needs[seq]] = blocks[seq]
        at = torch.arange(length - new, length)
        positions.append(at)
        slots.append(blocks[seq][at // block_size] * block_size + at % block_size)
        starts.append(starts[-1] + new)
    rows = starts[-1]
    return ForwardBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_starts=starts,
        context_lens=[length for length, _ in lengths],
        block_tables=tables,
        logits_rows=torch.empty(0, dtype=torch.int64),
    )


class Ranks:
    """KV of one layer on several ranks, and steps of all of them."""

    def __init__(
        self, size: int, run: int, make: Callable[[], PartialAttention], sizes: Sizes, dtype: str = "float32"
    ) -> None:
        self.dealing = Dealing(size, run)
        self._make, self._sizes = make, sizes
        layout = KVLayout(1, 2, run, KV_HEADS, DIM, dtype)
        self._kvs = [DeviceKV(layout, 200) for _ in range(size)]
        for kv in self._kvs:
            kv.data.fill_(float("nan"))  # what lies beyond a sequence must not be read

    def attend(
        self, batch: ForwardBatch, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Return what all ranks find for the rows of the batch, [T, H, D]."""
        size = self.dealing.size
        board = Board(size)
        output = torch.full_like(q, float("nan"))

        def run(rank: int) -> None:
            step = DealtStep(batch, self.dealing, rank, self._sizes)
            rows = torch.from_numpy(step.own_rows)
            own = replace(
                batch,
                slots=torch.from_numpy(self.dealing.own_slots(rank, batch.slots.numpy()[step.own_rows])),
            )
            group: Any = ThreadGroup(board, rank, size)
            made = self._make()
            writer = AttentionStep(own, self._kvs[rank])
            context = ContextStep(step, self._kvs[rank], group, made, writer)
            if len(rows):
                output[rows] = context.attend(call, q[rows], k[rows], v[rows])
            else:
                context.exchange(call, q[rows], DIM)
            made.close()

        with ThreadPoolExecutor(size) as pool:
            for done in [pool.submit(run, rank) for rank in range(size)]:
                done.result(60.0)
        return output


def native(isa: str = "auto") -> PartialAttention:
    kernels = load_kernels(isa)
    if kernels is None:
        pytest.skip("no kernels")
    return NativePartials(kernels, DIM)


def drawn(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(rows, heads, DIM, generator=generator) for heads in sizes)
    return q * 3, k, v


@pytest.mark.parametrize("sizes", [QUERIES_TRAVEL, KEYS_TRAVEL])
@pytest.mark.parametrize("make", [native, lambda: TorchPartials(DIM)])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("size", [2, 3])
def test_attention_is_that_of_one_rank(
    size: int, call: AttentionCall, make: Callable[[], PartialAttention], sizes: Sizes
) -> None:
    make()
    lengths = [(45, 45), (1, 1), (7, 7), (300, 300)]
    ranks = Ranks(size, 4, make, sizes)
    for new in (lengths, [(46, 1), (2, 1), (30, 23), (301, 1)]):
        batch = batch_of(lengths if new is lengths else new, ranks.dealing.block_size)
        one = DeviceKV(KVLayout(1, 2, ranks.dealing.block_size, KV_HEADS, DIM, "float32"), 200)
        whole = batch_of([(length, length) for length, _ in new], ranks.dealing.block_size)
        all_q, all_k, all_v = drawn(whole.query_starts[-1])
        expected = AttentionStep(whole, one).attend(call, all_q, all_k, all_v)
        rows = torch.cat(
            [
                torch.arange(end - count, end)
                for end, (_, count) in zip(whole.query_starts[1:], new, strict=True)
            ]
        )
        if new is not lengths:
            ranks.attend(whole, call, all_q, all_k, all_v)
        found = ranks.attend(batch, call, all_q[rows], all_k[rows], all_v[rows])
        torch.testing.assert_close(found, expected[rows], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_doesnt_depend_on_its_chunk_or_on_what_travels(dtype: torch.dtype, isa: str) -> None:
    length = 700
    q, k, v = (one.to(dtype) for one in drawn(length))
    name = str(dtype).removeprefix("torch.")
    found = []
    in_chunks, decoded = [0, 33, 290, 512, length], [0, *range(length - 40, length + 1)]
    for sizes, cuts in (
        (KEYS_TRAVEL, [0, length]),
        (QUERIES_TRAVEL, [0, length]),
        (KEYS_TRAVEL, in_chunks),
        (KEYS_TRAVEL, decoded),
    ):
        ranks = Ranks(2, 8, partial(native, isa), sizes, name)
        parts = []
        for start, end in pairwise(cuts):
            batch = batch_of([(end, end - start)], 16)
            batch.block_tables = batch_of([(length, 1)], 16).block_tables[:, : batch.block_tables.shape[1]]
            at = torch.arange(start, end)
            batch.slots = batch.block_tables[0].long()[at // 16] * 16 + at % 16
            parts.append(ranks.attend(batch, WHOLE, q[start:end], k[start:end], v[start:end]))
        found.append(torch.cat(parts))
    for one in found[1:]:
        assert torch.equal(one, found[0])


def test_every_token_is_held_once() -> None:
    dealing = Dealing(3, 4)
    positions = np.arange(100)
    owners = dealing.owners(positions)
    for rank in range(3):
        held = np.cumsum(owners == rank)
        assert (dealing.num_held(rank, positions + 1) == held).all()
    heads = [[dealing.num_held_of_block(rank, tokens) for rank in range(3)] for tokens in (0, 3, 4, 9, 12)]
    assert heads == [[0, 0, 0], [3, 0, 0], [4, 0, 0], [4, 4, 1], [4, 4, 4]]
