"""Paged attention by the C++ kernels: decodes and prefill chunks in one call a layer, no gather, no mask.

The plan of a step (which sequences share a prefix, how keys are cut into pieces) is made once and used by
all layers. It decides who computes what; a row's result is the same to the bit under any plan (attention.h).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, StoredAs
from stemma.model.attend.attention import AttentionCall, Sight
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cpu.selection import select
from stemma.native.library import Kernels
from stemma.native.structures import AttendArgs, BatchArgs, KVFormat, WriteArgs

_STORED: tuple[StoredAs, ...] = ("plain", "int8", "fp8")
"""By their numbers in kv_format.h."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedQueries:
    """The shape of a step that a plan is made for: T rows of S sequences, as in `ForwardBatch`."""

    starts: npt.NDArray[np.int32]
    """[S + 1]."""
    num_keys: npt.NDArray[np.int32]
    """[S]."""
    tables: npt.NDArray[np.int32]
    """[S, N], contiguous."""
    limits: npt.NDArray[np.int32] | None = None
    """[T]: keys that each row sees; None: those up to its own."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> PlannedQueries:
        """Return those of a whole step."""
        return cls(
            np.array(batch.query_starts, dtype=np.int32),
            np.array(batch.context_lens, dtype=np.int32),
            np.ascontiguousarray(batch.block_tables.numpy(), dtype=np.int32),
            None if batch.limits is None else batch.limits.numpy(),
        )


class NativePlan:
    """The kernels' plan of a step, for layers with these numbers of KV heads and of query heads on each."""

    def __init__(self, queries: PlannedQueries, block_size: int, num_kv_heads: int, group_size: int) -> None:
        self._queries = queries  # the plan points there
        self._args = BatchArgs(
            len(queries.num_keys),
            queries.starts.ctypes.data,
            queries.num_keys.ctypes.data,
            queries.tables.ctypes.data,
            queries.tables.shape[1],
            block_size,
            None if queries.limits is None else queries.limits.ctypes.data,
        )
        self._shape = num_kv_heads, group_size
        self.handle: int | None = None

    def open(self, kernels: Kernels) -> int:
        """Make the plan on first use and return its handle."""
        if self.handle is None:
            handle = kernels.plan_new(ctypes.addressof(self._args), *self._shape, torch.get_num_threads())
            self.handle = int(handle)
        return self.handle

    def free(self, kernels: Kernels) -> None:
        """Free what `open` made."""
        if self.handle is not None:
            kernels.plan_free(self.handle)
        self.handle = None


class NativeAttentionStep:
    """`StepContext` over the C++ kernels; a context manager, since plans are freed by hand."""

    def __init__(self, batch: ForwardBatch, kv: DeviceKV, kernels: Kernels) -> None:
        self._batch = batch
        self.kv = kv
        self._kernels = kernels
        self._plans: dict[tuple[int, int], NativePlan] = {}
        self._lows: dict[Sight, npt.NDArray[np.int32]] = {}
        """The first token that each row sees, where the kernels can't count it from the last one."""
        self._selected: NativePlan | None = None
        """Over the tokens that queries chose last."""

    def __enter__(self) -> NativeAttentionStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for plan in self._plans.values():
            plan.free(self._kernels)
        self._plans.clear()
        self._drop_selected()

    def plan(self, num_kv_heads: int, group_size: int) -> NativePlan:
        """Return the step's plan for layers of this shape."""
        key = num_kv_heads, group_size
        plan = self._plans.get(key)
        if plan is None:
            queries = PlannedQueries.of(self._batch)
            plan = self._plans[key] = NativePlan(queries, self.kv.layout.block_size, *key)
        return plan

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the KV of the new tokens, then attend; see `StepContext.attend`."""
        self.write(call, key, value)
        kv, group_size = self.kv, query.shape[1] // key.shape[1]
        selects = call.selection is not None and call.selection.chooses(self._batch.context_lens)
        plan = self._plan_selected(call, group_size) if selects else self.plan(key.shape[1], group_size)
        value_dim = value.shape[2]
        if call.latent is not None:
            query, value_dim = call.latent.absorb(query), call.latent.rank
        if query.stride(2) != 1:
            query = query.contiguous()
        output = query.new_empty(query.shape[0], query.shape[1], value_dim)
        args = AttendArgs(
            query=query.data_ptr(),
            keys=kv.address(call.layer_idx, 0),
            values=kv.address(call.layer_idx, 0 if call.latent is not None else 1),
            output=output.data_ptr(),
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            block_stride=kv.token_stride if selects else kv.block_stride,
            token_stride=kv.token_stride,
            head_stride=kv.layout.head_dim,
            key_dim=query.shape[2],
            value_dim=value_dim,
            window=call.sliding_window or 0,
            first_key=call.first_key,
            is_bf16=query.dtype == torch.bfloat16,
            scale=call.scaling,
            softcap=call.softcap or 0.0,
            sinks=None if call.sinks is None else call.sinks.data_ptr(),
            lows=self._lows_of(call),
            format=native_format(kv.layout),
        )
        self._kernels.attend(plan.open(self._kernels), ctypes.addressof(args))
        return output if call.latent is None else call.latent.project(output)

    def _lows_of(self, call: AttentionCall) -> int | None:
        """Return the address of the first token that each row sees; None: the kernels count it themselves."""
        sight = call.sight
        is_counted = sight.chunk is None and (self._batch.limits is None or sight.window is None)
        if is_counted:
            return None
        if sight not in self._lows:
            self._lows[sight] = sight.first(self._batch.positions.numpy()).astype(np.int32)
        return int(self._lows[sight].ctypes.data)

    def _plan_selected(self, call: AttentionCall, group_size: int) -> NativePlan:
        """Return the plan over chosen tokens: each query is a sequence, each of its tokens a block."""
        assert call.selection is not None
        if call.selection.scoring is not None:
            self._drop_selected()
            places, counts = select(self._kernels, call.selection, call.layer_idx, self._batch, self.kv)
            starts = np.arange(len(counts) + 1, dtype=np.int32)
            self._selected = NativePlan(PlannedQueries(starts, counts, places), 1, 1, group_size)
        assert self._selected is not None
        return self._selected

    def _drop_selected(self) -> None:
        if self._selected is not None:
            self._selected.free(self._kernels)
        self._selected = None

    def write(self, call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the KV of the new tokens into its slots."""
        self._write_rows(call.layer_idx, 0, key)
        if call.latent is None:
            self._write_rows(call.layer_idx, 1, value)

    def _write_rows(self, layer: int, part: int, rows: torch.Tensor) -> None:
        """Write new rows [T, Hk, D] into their slots, as the layout stores them."""
        slots = self._batch.slots
        if (written := self._batch.written_rows) is not None:
            rows, slots = rows[written], slots[written]
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        kv = self.kv
        args = WriteArgs(
            source=rows.data_ptr(),
            target=kv.address(layer, part),
            slots=slots.data_ptr(),
            tokens=rows.shape[0],
            source_token_stride=rows.stride(0),
            source_head_stride=rows.stride(1),
            block_stride=kv.block_stride,
            token_stride=kv.token_stride,
            head_stride=kv.layout.head_dim,
            heads=rows.shape[1],
            dim=rows.shape[2],
            block_size=kv.layout.block_size,
            is_bf16=rows.dtype == torch.bfloat16,
            threads=torch.get_num_threads(),
            format=native_format(kv.layout),
        )
        self._kernels.write_rows(ctypes.addressof(args))


def native_format(layout: KVLayout) -> KVFormat:
    """Describe to the kernels how a layout stores rows."""
    return KVFormat(
        stored=_STORED.index(layout.stored),
        num_scales=layout.num_scales,
        first_dims=layout.latent_rank or layout.head_dim,
        scale_offset=layout.scale_offset,
        column_stride=layout.column_stride,
    )
