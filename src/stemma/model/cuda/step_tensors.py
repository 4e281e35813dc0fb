"""Inputs of the attention kernels on a device in addition to q, k and v, all in device memory.

Kernels see lengths and tables only through these tensors. So a recorded step serves other lengths after the
tensors are refilled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.shared_prefix import SharedTensors


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of the kernels for a batch of T tokens in S sequences, on the device."""

    slots: torch.Tensor
    """[T] int64; negative: nothing is written for the token."""
    query_starts: torch.Tensor
    """[S + 1] int32."""
    context_lens: torch.Tensor
    """[S] int32; 0 for a padding row, whose output is zeros."""
    block_tables: torch.Tensor
    """[S, max_blocks] int32."""
    num_queries: tuple[int, ...]
    """Query tokens of each sequence, S entries, on the host."""
    shared: SharedTensors | None = None
    """Prefixes that several decodes share; None: none are worth a separate pass."""

    @classmethod
    def of(
        cls, batch: ForwardBatch, device: torch.device, shared: SharedTensors | None = None
    ) -> StepTensors:
        """Copy what `batch` keeps on the host to the device."""
        starts = torch.tensor(batch.query_starts, dtype=torch.int32)
        lens = torch.tensor(batch.context_lens, dtype=torch.int32)
        num_queries = tuple(int(n) for n in torch.diff(starts))
        return cls(
            batch.slots,
            starts.to(device, non_blocking=True),
            lens.to(device, non_blocking=True),
            batch.block_tables.to(device, non_blocking=True),
            num_queries,
            shared,
        )
