"""From a scheduled step to logits: flattens it into a `ForwardBatch`.

The arrays of a step are written into buffers that are made once and reused, so a decode costs a few numpy
stores a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from stemma.engine.scheduler import Scheduled
from stemma.memory.device import DeviceKV
from stemma.model.batch import ForwardBatch


class LanguageModel(Protocol):
    """The part of `model.causal_lm.CausalLM` that the runner needs."""

    device: torch.device

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the KV of the batch's tokens and return the wanted logits, [L, vocab] float32."""


class Runner:
    """Runs steps, one at a time."""

    def __init__(self, model: LanguageModel, kv: DeviceKV, *, max_batch_tokens: int) -> None:
        self._model = model
        self.kv = kv
        self._block_size = kv.layout.block_size
        self._token_ids: npt.NDArray[np.int64] = np.empty(max_batch_tokens, dtype=np.int64)
        self._positions: npt.NDArray[np.int64] = np.empty(max_batch_tokens, dtype=np.int64)
        self._slots: npt.NDArray[np.int64] = np.empty(max_batch_tokens, dtype=np.int64)
        self._logits_rows: npt.NDArray[np.int64] = np.empty(max_batch_tokens, dtype=np.int64)
        self._counting: npt.NDArray[np.int64] = np.arange(max_batch_tokens, dtype=np.int64)
        self._tables: npt.NDArray[np.int32] = np.zeros((8, 64), dtype=np.int32)

    def forward(self, plan: Seq[Scheduled]) -> torch.Tensor:
        """Return the logits that the plan wants, in its order, [sum of num_logits, vocab] float32."""
        logits = self._model.forward(self._batch(plan), self.kv)
        if logits.is_cuda and len(logits) == 0:
            # Nobody will wait for such a step by reading its result. But it must be over before blocks change
            # hands (loads write on a stream of their own), and its time is measured.
            torch.cuda.current_stream(logits.device).synchronize()
        return logits

    def _batch(self, plan: Seq[Scheduled]) -> ForwardBatch:
        starts, context_lens = [0], []
        row = num_logits = max_blocks = 0
        for item in plan:
            end = row + item.num_tokens
            self._fill(item, row, end)
            for logits_row in range(end - item.num_logits, end):
                self._logits_rows[num_logits] = logits_row
                num_logits += 1
            row = end
            starts.append(end)
            context = item.start + item.num_tokens
            context_lens.append(context)
            max_blocks = max(max_blocks, -(-context // self._block_size))
        device = self._model.device
        return ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids[:row]).to(device),
            positions=torch.from_numpy(self._positions[:row]).to(device),
            slots=torch.from_numpy(self._slots[:row]).to(device),
            query_starts=starts,
            context_lens=context_lens,
            block_tables=torch.from_numpy(self._block_tables(plan, max_blocks)),
            logits_rows=torch.from_numpy(self._logits_rows[:num_logits]).to(device),
        )

    def _fill(self, item: Scheduled, row: int, end: int) -> None:
        """Write ids, positions and slots of one item into rows ``row:end``."""
        lease = item.sequence.lease
        assert lease is not None
        size, start = self._block_size, item.start
        tokens, table = lease.tokens, lease.block_table
        if item.num_tokens == 1:
            self._token_ids[row] = tokens[start]
            self._positions[row] = start
            self._slots[row] = int(table[start // size]) * size + start % size
            return
        num_known = item.num_tokens - len(item.draft)
        self._token_ids[row : row + num_known] = tokens[start : start + num_known]
        if item.draft:
            self._token_ids[row + num_known : end] = item.draft
        positions = self._positions[row:end]
        np.add(self._counting[: item.num_tokens], start, out=positions)
        blocks, offsets = np.divmod(positions, size)
        self._slots[row:end] = table[blocks].astype(np.int64) * size + offsets

    def _block_tables(self, plan: Seq[Scheduled], max_blocks: int) -> npt.NDArray[np.int32]:
        num_rows, num_columns = self._tables.shape
        if len(plan) > num_rows or max_blocks > num_columns:
            shape = (max(num_rows, 2 * len(plan)), max(num_columns, 2 * max_blocks))
            self._tables = np.zeros(shape, dtype=np.int32)
        tables = self._tables[: len(plan), :max_blocks]
        for i, item in enumerate(plan):
            lease = item.sequence.lease
            assert lease is not None
            used = min(lease.num_blocks, max_blocks)
            tables[i, :used] = lease.block_table[:used]
            tables[i, used:] = 0
        return tables
