"""Paged attention by the C++ kernels: decodes and prefill chunks in one call a layer, no gather, no mask.

The plan of a step (which sequences share a prefix, how keys are cut into pieces) is made once and used by
all layers. It decides who computes what; a row's result is the same to the bit under any plan (attention.h).
"""

from __future__ import annotations

import ctypes
from types import TracebackType

import numpy as np
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attention import AttentionCall
from stemma.model.batch import ForwardBatch
from stemma.model.paged import AttentionStep
from stemma.native.library import AttendArgs, BatchArgs, Kernels


class NativePlan:
    """What the kernels do in a step, for layers with this number of KV heads and query heads on each."""

    def __init__(self, batch: ForwardBatch, block_size: int, num_kv_heads: int, group_size: int) -> None:
        starts = np.array(batch.query_starts, dtype=np.int32)
        context_lens = np.array(batch.context_lens, dtype=np.int32)
        tables = np.ascontiguousarray(batch.block_tables.numpy(), dtype=np.int32)
        self._arrays = starts, context_lens, tables  # the plan points there
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

    def __init__(self, batch: ForwardBatch, kv: DeviceKV, kernels: Kernels) -> None:
        self._batch = batch
        self._kv = kv
        self._kernels = kernels
        self._plans: dict[tuple[int, int], NativePlan] = {}
        self._writer: AttentionStep | None = None

    def __enter__(self) -> NativeAttentionStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for plan in self._plans.values():
            if plan.handle is not None:
                self._kernels.plan_free(plan.handle)
        self._plans.clear()

    def plan(self, num_kv_heads: int, group_size: int) -> NativePlan:
        """Return the step's plan for layers of this shape."""
        key = num_kv_heads, group_size
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = NativePlan(self._batch, self._kv.layout.block_size, *key)
        return plan

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the KV of the new tokens, then attend; see `StepContext.attend`."""
        if self._writer is None:
            self._writer = AttentionStep(self._batch, self._kv)
        keys, values = self._writer.write(call, key, value)
        plan = self.plan(key.shape[1], query.shape[1] // key.shape[1])
        if call.latent is not None:
            query = call.latent.absorb(query)
        if query.stride(2) != 1:
            query = query.contiguous()
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
            None if call.sinks is None else call.sinks.data_ptr(),
        )
        self._kernels.attend(plan.open(self._kernels), ctypes.addressof(args))
        return output if call.latent is None else call.latent.project(output)
