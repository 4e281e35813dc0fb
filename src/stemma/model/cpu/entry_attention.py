"""Attention over windows and compressed entries by the C++ kernels.

Each row is a sequence of its own to them, and each of its keys a block of one token, at its place. So a row's
result depends on its query and its keys alone (native/attention.h).
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.compression import Compression
from stemma.model.attend.entry_attention import EntryAttentionStep
from stemma.model.attend.selection import TokenScores
from stemma.model.cpu.attention import NativePlan, PlannedQueries, native_format
from stemma.model.cpu.selection import IndexKeys, choose_among
from stemma.native.library import Kernels
from stemma.native.structures import AttendArgs


class NativeEntryStep(EntryAttentionStep):
    """`StepContext` of layers that compress their KV, over the C++ kernels."""

    def __init__(self, batch: ForwardBatch, kv: DeviceKV, kernels: Kernels) -> None:
        super().__init__(batch, kv)
        self._kernels = kernels

    def attend_to(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        places: torch.Tensor,
        counts: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend with q [n, H, D] to the first `counts` [n] of the keys at `places` [n, N], to `output`."""
        if query.stride(2) != 1:
            query = query.contiguous()
        starts = np.arange(len(query) + 1, dtype=np.int32)
        tables = np.ascontiguousarray(places.numpy(), dtype=np.int32)
        plan = NativePlan(
            PlannedQueries(starts, counts.numpy().astype(np.int32), tables), 1, 1, query.shape[1]
        )
        args = AttendArgs(
            query=query.data_ptr(),
            keys=self.kv.data.data_ptr(),
            values=self.kv.data.data_ptr(),
            output=output.data_ptr(),
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            block_stride=self.unit,
            token_stride=self.unit,
            head_stride=query.shape[2],
            key_dim=query.shape[2],
            value_dim=output.shape[2],
            window=0,
            first_key=0,
            is_bf16=query.dtype == torch.bfloat16,
            scale=call.scaling,
            softcap=0.0,
            sinks=None if call.sinks is None else call.sinks.data_ptr(),
            lows=None,
            format=native_format(self.kv.layout),
        )
        try:
            self._kernels.attend(plan.open(self._kernels), ctypes.addressof(args))
        finally:
            plan.free(self._kernels)

    def choose(
        self, how: Compression, rows: slice, entries: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of the entries that rows of one sequence choose [n, top_k], and how many [n]."""
        selection = how.selection
        assert selection is not None
        assert selection.scoring is not None
        scoring = TokenScores(selection.scoring.query[rows], selection.scoring.weights[rows])
        data = self.kv.data
        keys = IndexKeys(
            data.data_ptr() + (how.kept.entry_dim - selection.dim) * data.element_size(),
            self.unit,
            self.unit,
            1,
            is_bf16=data.dtype == torch.bfloat16,
        )
        starts = np.arange(len(counts) + 1, dtype=np.int32)
        table = np.ascontiguousarray(entries.numpy(), dtype=np.int32)[None]
        num_keys = counts.numpy().astype(np.int32)
        places, found = choose_among(self._kernels, selection, scoring, keys, starts, num_keys, table)
        return torch.from_numpy(places).long(), torch.from_numpy(found).long()
