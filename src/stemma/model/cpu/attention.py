"""Paged attention by the C++ kernels: decodes and prefill chunks in one call a layer, no gather, no mask.

The plan of a step (which sequences share a prefix, how keys are cut into pieces) is made once and used by
all layers. Sequences with more queries than a limit go to torch instead, where that is faster.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any

import numpy as np
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attention import AttentionCall
from stemma.model.batch import ForwardBatch
from stemma.model.paged import AttentionStep
from stemma.native.library import AttendArgs, BatchArgs, Kernels

ALL_QUERIES = 1 << 30
"""A limit that no sequence exceeds."""


class NativePlan:
    """What the kernels do in a step: covers the sequences with up to `max_queries` query tokens."""

    def __init__(
        self, batch: ForwardBatch, block_size: int, max_queries: int, num_kv_heads: int, group_size: int
    ) -> None:
        starts = np.array(batch.query_starts, dtype=np.int32)
        context_lens = np.array(batch.context_lens, dtype=np.int32)
        tables = batch.block_tables.numpy()
        lengths = np.diff(starts)
        short = lengths <= max_queries
        self.rows: torch.Tensor | None = None
        """[R] int64, rows of the batch that are covered; None: all."""
        self.covers_all = bool(short.all())
        self.covers_none = not short.any()
        if not self.covers_all:
            self.rows = torch.from_numpy(np.flatnonzero(np.repeat(short, lengths)))
            tables, context_lens = tables[short], context_lens[short]
            starts = np.concatenate(([0], np.cumsum(lengths[short]))).astype(np.int32)
        tables = np.ascontiguousarray(tables, dtype=np.int32)
        self._arrays: tuple[np.ndarray[Any, Any], ...] = (
            starts,
            context_lens,
            tables,
        )  # the plan points there
        self._args = BatchArgs(
            len(context_lens),
            starts.ctypes.data,
            context_lens.ctypes.data,
            tables.ctypes.data,
            tables.shape[1],
            block_size,
        )
        self._shape = num_kv_heads, group_size
        self.handle: int | None = None

    def open(self, kernels: Kernels) -> int:
        """Make the plan on first use and return its handle."""
        if self.handle is None:
            handle = kernels.plan_new(ctypes.addressof(self._args), *self._shape, torch.get_num_threads())
            self.handle = int(handle)
        return self.handle


class NativeAttentionStep:
    """`StepContext` over the C++ kernels; a context manager, since plans are freed by hand."""

    def __init__(self, batch: ForwardBatch, kv: DeviceKV, kernels: Kernels, max_queries: int) -> None:
        self._batch = batch
        self._kv = kv
        self._kernels = kernels
        self._max_queries = max_queries
        self._plans: dict[tuple[int, int, int], NativePlan] = {}
        self._torch_steps: dict[int, AttentionStep] = {}

    def __enter__(self) -> NativeAttentionStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for plan in self._plans.values():
            if plan.handle is not None:
                self._kernels.plan_free(plan.handle)
        self._plans.clear()

    def plan(self, max_queries: int, num_kv_heads: int, group_size: int) -> NativePlan:
        """Return the step's plan for layers of this shape."""
        key = max_queries, num_kv_heads, group_size
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = NativePlan(self._batch, self._kv.layout.block_size, *key)
        return plan

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the KV of the new tokens, then attend; see `StepContext.attend`."""
        latent = call.latent
        limit = self._max_queries if latent is None else latent.max_absorbed_queries
        rest = self._torch_steps.get(limit)
        if rest is None:
            rest = self._torch_steps[limit] = AttentionStep(self._batch, self._kv, longer_than=limit)
        caches = rest.write(call, key, value)
        plan = self.plan(limit, key.shape[1], query.shape[1] // key.shape[1])
        if plan.covers_all:
            return self._attend_short(call, plan, query, caches)
        value_dim = value.shape[-1] if latent is None else latent.value_dim
        output = query.new_empty(query.shape[0], query.shape[1], value_dim)
        rest.read(call, query, caches, output)
        if not plan.covers_none:
            output[plan.rows] = self._attend_short(call, plan, query[plan.rows], caches)
        return output

    def _attend_short(
        self,
        call: AttentionCall,
        plan: NativePlan,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        if call.latent is not None:
            query = call.latent.absorb(query)
        if query.stride(2) != 1:
            query = query.contiguous()
        keys, values = caches
        output = query.new_empty(query.shape[0], query.shape[1], values.shape[-1])
        args = AttendArgs(
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            output.data_ptr(),
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            keys.shape[-1],
            values.shape[-1],
            call.sliding_window or 0,
            query.dtype == torch.bfloat16,
            call.scaling,
            call.softcap or 0.0,
        )
        self._kernels.attend(plan.open(self._kernels), ctypes.addressof(args))
        return output if call.latent is None else call.latent.project(output)
