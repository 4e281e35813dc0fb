"""Attention of one row at a time, in one order of sums: what kernels with fixed pieces do, made for tests."""

from __future__ import annotations

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.kv_format import KVRows


class RowReader:
    """`AttentionReader` whose rows see nothing of the batch."""

    def __init__(self, batch: ForwardBatch, kv: DeviceKV) -> None:
        self._batch, self._kv, self.slots = batch, kv, batch.slots

    def read(self, call: AttentionCall, query: torch.Tensor, value_dim: int | None = None) -> torch.Tensor:
        """Attend, one row after the other."""
        dim = query.shape[2]
        keys, values = (KVRows(self._kv, call.layer_idx, part, dim) for part in (0, 0 if call.latent else 1))
        value_dim = call.latent.rank if call.latent else value_dim or dim
        output = query.new_zeros(*query.shape[:2], value_dim)
        for seq, table in enumerate(self._batch.block_tables):
            first, last = self._batch.query_starts[seq : seq + 2]
            for row in range(first, last):
                end = self._batch.context_lens[seq] - (last - 1 - row)
                begin = max(0, end - call.sliding_window) if call.sliding_window else 0
                cached = (
                    part.gather(table.long()).flatten(0, 1)[begin:end].float() for part in (keys, values)
                )
                attended = _attend_row(call, query[row].float(), *cached)[:, :value_dim]
                output[row] = attended.to(query.dtype)
        return output


def _attend_row(
    call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Take q [H, D], keys [C, Hk, D] and values [C, Hk, Dv]; return [H, Dv]."""
    group = query.shape[0] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    scores = (keys * query).sum(-1) * call.scaling
    if call.sinks is not None:
        scores = torch.cat((scores, call.sinks[None]))
    weights = scores.softmax(0)[: len(keys)]
    return (weights[..., None] * values).sum(0)
