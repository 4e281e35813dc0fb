"""One step's flattened batch: what the attention function needs in addition to q, k and v."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of S sequences, flattened; sequence s owns rows ``query_starts[s]:query_starts[s + 1]``.

    A decode is a sequence with one query token; a prefill chunk has more. The KV of the T tokens is
    written before attention reads, so `context_lens` counts them.
    """

    token_ids: torch.Tensor
    """[T] int64, on the model's device."""
    positions: torch.Tensor
    """[T] int64."""
    slots: torch.Tensor
    """[T] int64: ``block_id * block_size + offset``, where each token's KV is written."""
    query_starts: list[int]
    """S + 1 entries."""
    context_lens: list[int]
    """S entries: tokens of the sequence that have KV after this step has written its own."""
    block_tables: torch.Tensor
    """[S, max_blocks] int32, on CPU; rows padded with 0."""
    logits_rows: torch.Tensor
    """[L] int64: rows that need logits."""

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.context_lens)
