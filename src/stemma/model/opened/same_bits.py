"""Whether a model's logits depend on how a prompt is cut, on what stands before it, or on where it lies.

For the self-check at load (selfcheck.py). A tolerance would not do: rounding to bfloat16 hides a lost state
of an eighth of the logits' spread. So the same tokens run in several ways, and every bit is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from stemma.errors import UnsupportedModel
from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import SUPPORTED
from stemma.model.attend.batch import ForwardBatch, PageTables, StateMoves
from stemma.model.opened.causal_lm import CausalLM

_BLOCK_SIZE = 8
"""On each of the ranks that tokens are divided over."""
_FARTHEST = 1 << 16
"""Tokens of context that the check attends over at most: seconds of a small machine."""
_ROWS_FAR_BEHIND = 4

Rows: TypeAlias = tuple[int, int, int]
"""A sequence's number, and which of its tokens run: from, to."""


@dataclass(frozen=True, slots=True)
class ProbePiece:
    """Tokens of one sequence that run, at its beginning or behind a context of any content."""

    tokens: torch.Tensor
    """[T] int64, on CPU."""
    first: int = 0
    """Position of the first token."""


def run_pieces(
    model: CausalLM, pieces: Sequence[ProbePiece], steps: Sequence[Sequence[Rows]]
) -> list[torch.Tensor]:
    """Return the logits [T, vocab] of every piece, on CPU, computed step by step over blocks in mixed order.

    Positions before a piece share one block of random KV; a recurrent state begins with the piece. Ranks that
    compute no logits return none.
    """
    kv, tables = _paged(model, pieces)
    logits: list[list[torch.Tensor]] = [[] for _ in pieces]
    for step in steps:
        batch = _batch(model, kv, pieces, tables, step)
        rows = model.forward(batch, kv).float().cpu()
        for number, (piece, _, _) in enumerate(step):
            logits[piece].append(rows[batch.query_starts[number] : batch.query_starts[number + 1]])
    return [torch.cat(parts) for parts in logits]


def _paged(model: CausalLM, pieces: Sequence[ProbePiece]) -> tuple[DeviceKV, torch.Tensor]:
    """Return the KV of a few sequences, and their tables of blocks [S, B]; block 0 is everybody's past."""
    size = _BLOCK_SIZE * model.context_size
    firsts = [piece.first // size for piece in pieces]
    ends = [-(-(piece.first + len(piece.tokens)) // size) for piece in pieces]
    num_blocks = 1 + sum(end - first for first, end in zip(firsts, ends, strict=True))
    layout = model.layout(size)
    kv = DeviceKV(
        layout,
        layout.aligned(num_blocks),
        model.device,
        num_states=0 if layout.state is None else len(pieces),
        num_pages=0 if layout.windows is None else num_blocks,
    )
    if kv.data.is_floating_point():
        kv.data.copy_(torch.randn(kv.data.shape[1:], generator=torch.Generator().manual_seed(7)))
    tables = torch.zeros(len(pieces), max(ends), dtype=torch.int32)
    unused = num_blocks
    for row, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        tables[row, first:end] = torch.arange(unused - 1, unused - 1 - (end - first), -1)
        unused -= end - first
    return kv, tables


def _batch(
    model: CausalLM, kv: DeviceKV, pieces: Sequence[ProbePiece], tables: torch.Tensor, step: Sequence[Rows]
) -> ForwardBatch:
    size, device = kv.layout.block_size, model.device
    sequences = [number for number, _, _ in step]
    positions = [pieces[number].first + torch.arange(start, end) for number, start, end in step]
    slots = [
        tables[number, at // size].long() * size + at % size
        for number, at in zip(sequences, positions, strict=True)
    ]
    starts = [0, *torch.tensor([len(at) for at in positions]).cumsum(0).tolist()]
    batch = ForwardBatch(
        token_ids=torch.cat([pieces[number].tokens[start:end] for number, start, end in step]).to(device),
        positions=torch.cat(positions).to(device),
        slots=torch.cat(slots).to(device),
        query_starts=starts,
        context_lens=[pieces[number].first + end for number, _, end in step],
        block_tables=tables[sequences],
        logits_rows=torch.arange(starts[-1], device=device),
    )
    if kv.layout.state is not None:
        batch.states = StateMoves(
            tuple(number if start else None for number, start, _ in step), tuple(sequences), ()
        )
    if kv.layout.windows is not None:
        batch.pages = PageTables(batch.slots, batch.block_tables)  # a page for each block
    return batch


def check_same_bits(model: CausalLM, tokens: torch.Tensor, limit: float | None) -> None:
    """Run tokens [T] whole, in two chunks, behind foreign rows, and far behind a context; compare the logits.

    `limit`: the error that is allowed where rows aren't computed alike, as a share of the logits' spread;
    None: not a bit. Raises UnsupportedModel.
    """
    count, cut = len(tokens), len(tokens) // 2
    counted = RowCounting(count)
    with counted:
        [whole] = run_pieces(model, [ProbePiece(tokens)], [[(0, 0, count)]])
    if counted.by is not None:
        raise UnsupportedModel(
            f"{_name(model)} can't be served: {counted.by} counts the rows of a step where it should take "
            f"positions, which differ from them in every chunk but the first. {SUPPORTED}"
        )
    chunks = run_pieces(model, [ProbePiece(tokens)], [[(0, 0, cut)], [(0, cut, count)]])
    _compare(model, "in two chunks", chunks[0], whole, limit)
    pair = [ProbePiece(tokens.flip(0)), ProbePiece(tokens)]
    behind = run_pieces(model, pair, [[(0, 0, cut)], [(0, cut, count), (1, 0, count)]])
    _compare(model, "behind another prompt's rows", behind[1], whole, limit)
    few = tokens[:_ROWS_FAR_BEHIND]
    first = min(model.max_model_len, _FARTHEST) - len(few)
    if first > count:
        far = ProbePiece(few, first)
        [alone] = run_pieces(model, [far], [[(0, 0, len(few))]])
        steps: list[list[Rows]] = [[(1, 0, 1)], [(0, 0, count), (1, 1, len(few))]]
        cut_far = run_pieces(model, [pair[0], far], steps)[1]
        _compare(model, "near the end of the context, in two chunks", cut_far, alone, limit)


def _compare(
    model: CausalLM, how: str, logits: torch.Tensor, expected: torch.Tensor, limit: float | None
) -> None:
    is_same = torch.equal(logits, expected) if limit is None else median_error(logits, expected) <= limit
    if is_same:
        return
    raise UnsupportedModel(
        f"{_name(model)} can't be served: {how} it computes other logits than in one chunk (off by "
        f"{median_error(logits, expected):.2g} of their spread). It may count positions itself, keep state "
        f"other than KV, or mix the rows of a step, so a cached answer would differ. {SUPPORTED}"
    )


def _name(model: CausalLM) -> str:
    return model.info.architecture


def median_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the median token's error, as a share of the spread of its logits [T, vocab].

    The median: rounding may route a single token to another expert.
    """
    spread = (reference - reference.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
    return float(((logits - reference).norm(dim=-1) / spread).median())


_PLACED = frozenset(
    {
        *(torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.scatter_, torch.scatter),
        *(torch.gather, torch.Tensor.gather, torch.index_select, torch.Tensor.index_select),
        *(torch.Tensor.index_add_, torch.Tensor.index_copy_, torch.Tensor.index_put_, torch.Tensor.scatter),
        *(torch.Tensor.scatter_add_, torch.Tensor.scatter_add, torch.take_along_dim),
    }
)
"""Functions that take rows' numbers to find rows, which is right in any step."""


class RowCounting(TorchFunctionMode):
    """Finds numbers of a step's rows that are computed with: only positions may be.

    A step's rows belong to several sequences. With a small prompt such a fault may not show in the logits:
    Llama 4's factor of queries changes every 8,192 tokens.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self._numbers: dict[int, torch.Tensor] = {}
        """By identity; held so that no other tensor gets it."""
        self.by: str | None = None
        """The function that computed with them; None: none did."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of each of its functions."""
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or func in _PLACED:
            return result
        is_numbers = func is torch.arange and result.numel() == self._num_rows
        if is_numbers or any(id(argument) in self._numbers for argument in args):
            if result.is_floating_point():
                self.by = self.by or getattr(func, "__name__", str(func))
            elif result.dtype is not torch.bool:
                self._numbers[id(result)] = result
        return result
