"""From a scheduled step to logits: flattens it into a `ForwardBatch`.

The arrays of a step are written into buffers that are made once and reused, so a decode costs a few numpy
stores a sequence. There are two sets, used in turn: while one step runs, the next can be prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from stemma.engine.core.adapter_seats import PreparedAdapters
from stemma.engine.core.images import ImageStats, ImageVectors, axes_of, limits_of
from stemma.engine.core.request import Scheduled
from stemma.engine.core.step_rows import StepRows
from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch, PageTables, StateMoves


class LanguageModel(Protocol):
    """The part of `model.causal_lm.CausalLM` that the runner needs."""

    device: torch.device

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the KV of the batch's tokens and return the wanted logits, [L, vocab] float32."""


class HostArray:
    """A host array; its first n elements copy to the device asynchronously if the memory is pinned."""

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        accelerator = accelerator_of(device)
        self._tensor = torch.zeros(length, dtype=dtype, pin_memory=accelerator.pins_memory)
        self._device = device
        self._is_there = accelerator.is_host
        self.array: npt.NDArray[Any] = self._tensor.numpy()

    def head(self, length: int) -> torch.Tensor:
        """Return the first elements, still on the host; a view."""
        return self._tensor[:length]

    def to_device(self, length: int) -> torch.Tensor:
        """Return the first elements on the device; on CPU a view."""
        head = self._tensor[:length]
        return head if self._is_there else head.to(self._device, non_blocking=True)


class StepBuffers:
    """Host arrays of one step. They may be written again once that step has ended."""

    def __init__(self, max_batch_tokens: int, device: torch.device) -> None:
        self._device = device
        self.token_ids = HostArray(max_batch_tokens, torch.int64, device)
        self.positions = HostArray(max_batch_tokens, torch.int64, device)
        self.slots = HostArray(max_batch_tokens, torch.int64, device)
        self.logits_rows = HostArray(max_batch_tokens, torch.int64, device)
        self._tables = HostArray(0, torch.int32, device)
        self._shaped = self._tables.head(0).view(0, 0), self._tables.array.reshape(0, 0)
        """The tables asked for last."""

    def block_tables(self, num_seqs: int, max_blocks: int) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        """Return a table [num_seqs, max_blocks] as torch and as numpy see it, contiguous, of any content."""
        shape = (num_seqs, max_blocks)
        if self._shaped[1].shape != shape:
            num = num_seqs * max_blocks
            if num > len(self._tables.array):
                self._tables = HostArray(2 * num, torch.int32, self._device)
            self._shaped = self._tables.head(num).view(shape), self._tables.array[:num].reshape(shape)
        return self._shaped


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that is ready to run, except for the ids that the previous step draws."""

    batch: ForwardBatch
    unknown_rows: torch.Tensor | None
    """[U] int64: rows of `batch.token_ids` to be filled in; None: all are known."""
    source_rows: torch.Tensor | None
    """[U] int64: which of the drawn ids go there."""


class Runner:
    """Runs steps, one at a time."""

    def __init__(
        self,
        model: LanguageModel,
        kv: DeviceKV,
        *,
        max_batch_tokens: int,
        adapters: PreparedAdapters | None = None,
        block_size: int | None = None,
        images: ImageVectors | None = None,
    ) -> None:
        """`adapters`: makes those that a step needs ready; None: no request has one.

        `block_size`: tokens of a block; None: `kv` holds them all. `images`: None: the model reads none.
        """
        self._images = images
        self.model = model
        self._adapters = adapters
        self.kv = kv
        self.on_launch: Callable[[bool], None] | None = None
        """`ForwardBatch.on_launch` of steps that run in turn; told whether the step is pure decode."""
        self.hidden: torch.Tensor | None = None
        """[T, H]: the hidden states of the step that ran last in turn, if `StepRows.wants_hidden`."""
        self._block_size = block_size or kv.layout.block_size
        self._counting: npt.NDArray[np.int64] = np.arange(max_batch_tokens, dtype=np.int64)
        self._buffers = StepBuffers(max_batch_tokens, model.device)
        self._other_buffers = StepBuffers(max_batch_tokens, model.device)

    @property
    def sees(self) -> bool:
        """Whether the model reads images."""
        return self._images is not None

    def image_stats(self) -> ImageStats:
        """Return what became of images so far."""
        return ImageStats() if self._images is None else self._images.stats()

    def forward(self, rows: StepRows) -> torch.Tensor:
        """Return the logits that a step wants, [L, vocab] float32, in the order that `rows` says."""
        batch = self._batch(rows)
        if self.on_launch is not None:
            batch.on_launch = partial(self.on_launch, rows.is_decode)
        self.kv.uploads.order()
        logits = self.model.forward(batch, self.kv)
        self.hidden = batch.hidden
        batch.on_launch()  # a replay of recorded kernels doesn't call it, and has queued them only
        if len(logits) == 0:
            # Nobody reads a result of such a step, so nobody waits for it. But it must end before blocks get
            # another owner (loads write on another stream), and its duration is measured.
            accelerator_of(self.model.device).synchronize()
        return logits

    def prepare(self, rows: StepRows) -> PreparedStep:
        """Prepare a step, perhaps while the previous one runs. At most two steps exist at a time."""
        batch = self._batch(rows)
        unknown, sources = rows.unknown()
        if not unknown:
            return PreparedStep(batch, None, None)
        device = self.model.device
        return PreparedStep(
            batch,
            torch.tensor(unknown).to(device, non_blocking=True),
            torch.tensor(sources).to(device, non_blocking=True),
        )

    def run(self, step: PreparedStep, drawn: torch.Tensor | None) -> torch.Tensor:
        """Return the logits of a prepared step; `drawn` [L] int64 are the ids of the step before, if any.

        Beside the host the work is queued only.
        """
        if step.unknown_rows is not None:
            assert drawn is not None
            assert step.source_rows is not None
            step.batch.token_ids.index_copy_(0, step.unknown_rows, drawn.index_select(0, step.source_rows))
        self.kv.uploads.order()
        return self.model.forward(step.batch, self.kv)

    def _batch(self, rows: StepRows) -> ForwardBatch:
        buffers = self._other_buffers
        self._buffers, self._other_buffers = buffers, self._buffers
        for item in rows.items:
            self._fill(buffers, item)
        images = None if self._images is None else self._images.rows(rows)
        if images is not None:
            buffers.token_ids.array[images.rows.numpy()] = (
                0  # any of the vocabulary: a vector takes its place
            )
        rows.write_logits_rows(buffers.logits_rows.array)
        context_lens = [item.end for item in rows.items]
        return ForwardBatch(
            token_ids=buffers.token_ids.to_device(rows.num_rows),
            positions=buffers.positions.to_device(rows.num_rows),
            slots=buffers.slots.to_device(rows.num_rows),
            query_starts=rows.query_starts,
            context_lens=context_lens,
            block_tables=self._block_tables(buffers, rows, -(-max(context_lens) // self._block_size)),
            logits_rows=buffers.logits_rows.to_device(rows.num_logits),
            adapters=() if self._adapters is None else self._adapters.rows(rows.adapters),
            states=_state_moves(rows) if self.kv.num_states else None,
            pages=self._page_tables(rows) if self.kv.num_pages else None,
            images=images,
            limits=None if images is None else limits_of(rows),
            axes=None if self._images is None else axes_of(rows),
            wants_hidden=rows.wants_hidden,
        )

    def _fill(self, buffers: StepBuffers, item: Scheduled) -> None:
        """Write ids, positions and slots of one item into its rows."""
        lease = item.sequence.lease
        assert lease is not None
        size, start, row = self._block_size, item.start, item.first_row
        end = row + item.num_tokens
        tokens, table = lease.tokens, lease.block_table
        token_ids, slots = buffers.token_ids.array, buffers.slots.array
        if item.num_tokens == 1:
            token_ids[row] = tokens[start] if item.source_row is None else 0
            buffers.positions.array[row] = start
            slots[row] = int(table[start // size]) * size + start % size
            return
        num_known = item.num_tokens - len(item.draft)
        token_ids[row : row + num_known] = tokens[start : start + num_known]
        if item.draft:
            token_ids[row + num_known : end] = item.draft
        positions = buffers.positions.array[row:end]
        np.add(self._counting[: item.num_tokens], start, out=positions)
        blocks, offsets = np.divmod(positions, size)
        slots[row:end] = table[blocks].astype(np.int64) * size + offsets

    def _page_tables(self, rows: StepRows) -> PageTables:
        """Return where layers with windows write and find KV."""
        size = self._block_size
        max_blocks = -(-max(item.end for item in rows.items) // size)
        tables = np.zeros((len(rows.items), max_blocks), dtype=np.int32)
        slots = np.empty(rows.num_rows, dtype=np.int64)
        for number, item in enumerate(rows.items):
            assert item.sequence.lease is not None
            assert item.sequence.lease.state is not None
            for block, page in item.sequence.lease.state.pages.items():
                if block < max_blocks:
                    tables[number, block] = page
            positions = np.arange(item.start, item.end)
            slots[item.first_row : item.first_row + item.num_tokens] = (
                tables[number, positions // size].astype(np.int64) * size + positions % size
            )
        return PageTables(torch.from_numpy(slots), torch.from_numpy(tables))

    def _block_tables(self, buffers: StepBuffers, rows: StepRows, max_blocks: int) -> torch.Tensor:
        result, tables = buffers.block_tables(len(rows.items), max_blocks)
        for i, item in enumerate(rows.items):
            lease = item.sequence.lease
            assert lease is not None
            used = min(lease.num_blocks, max_blocks)
            tables[i, :used] = lease.block_table[:used]
            if used < max_blocks:
                tables[i, used:] = 0
        return result


def _state_moves(rows: StepRows) -> StateMoves:
    """Return where the states of a step lie, as the scheduler planned it."""
    initial: list[int | None] = []
    last: list[int] = []
    snapshots: list[tuple[int, int]] = []
    for item in rows.items:
        assert item.sequence.lease is not None
        assert item.sequence.lease.state is not None
        move = item.sequence.lease.state.move
        assert move is not None
        assert move.last is not None
        initial.append(move.initial)
        last.append(move.last)
        snapshots += [(item.row_of(position - 1), state) for position, state in move.snapshots]
    return StateMoves(tuple(initial), tuple(last), tuple(snapshots))
