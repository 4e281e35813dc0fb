"""Attention of rows over one rank's keys, as partial results that are merged in the order of ranks.

A partial result of a row is ``[maximum of its scores, sum of weights, weighted values]``, the last two
relative to that maximum: its log-sum-exp, in two numbers. What comes out for a row and a rank depends on
the row's query, on the keys that it sees there and on their order alone, whoever computes it, and all are
merged rank by rank: so a row has one order of sums, whatever was cached, whatever the chunk.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from stemma.memory.device.layout import KVLayout
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.kv_format import KVRows, LayerSource
from stemma.model.cpu.attention import NativePlan, PlannedQueries, native_format
from stemma.model.parallel.dealing import Queries
from stemma.native.library import Kernels
from stemma.native.structures import AttendArgs, MergeArgs

EXTRA = 2
"""Numbers of a partial result beside the weighted values."""


class PartialAttention(Protocol):
    """One step's attention over parts of the keys."""

    def attend(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        source: LayerSource,
        queries: Queries,
        lows: npt.NDArray[np.int32] | None,
    ) -> torch.Tensor:
        """Return the partial results of q [T, H, D] over the keys in `source`, [T, H, Dv + 2] float32.

        Of a latent (`call.latent`) q is absorbed, and Dv its rank. `lows`: see `DealtStep.lows`.
        """

    def merge(self, call: AttentionCall, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Merge [P, T, H, Dv + 2] in the order of P; return [T, H, Dv] in `dtype`."""

    def close(self) -> None:
        """Free what the step holds."""


def value_dim_of(call: AttentionCall, value_dim: int) -> int:
    """Return the dims of what attention adds up in a layer whose values have `value_dim`."""
    return value_dim if call.latent is None else call.latent.rank


class NativePartials:
    """The C++ kernels: the order of sums of native/attention.h, over the keys of a rank."""

    def __init__(self, kernels: Kernels, value_dim: int) -> None:
        """`value_dim`: of the model's values; of latents it isn't used."""
        self._kernels = kernels
        self._value_dim = value_dim
        self._plans: dict[tuple[int, int, int], tuple[Queries, NativePlan]] = {}

    def attend(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        source: LayerSource,
        queries: Queries,
        lows: npt.NDArray[np.int32] | None,
    ) -> torch.Tensor:
        """Return partial sums [T, H, V + 2] in float32 of the keys that this rank holds."""
        layout, rows = source.layout, source.layer(call.layer_idx)
        if query.stride(2) != 1:
            query = query.contiguous()
        value_dim = value_dim_of(call, self._value_dim)
        # What no row sees is left as zeros: a sum of 0, which counts for nothing.
        output = torch.zeros(query.shape[0], query.shape[1], value_dim + EXTRA)
        values = 0 if call.latent is not None else rows.stride(1) * rows.element_size()
        args = AttendArgs(
            query=query.data_ptr(),
            keys=rows.data_ptr(),
            values=rows.data_ptr() + values,
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            block_stride=rows.stride(0),
            token_stride=rows.stride(3 if layout.tiled else 2),
            head_stride=layout.head_dim,
            key_dim=query.shape[2],
            value_dim=value_dim,
            is_bf16=query.dtype == torch.bfloat16,
            scale=call.scaling,
            softcap=call.softcap or 0.0,
            format=native_format(layout),
            lows=None if lows is None else lows.ctypes.data,
            partials=output.data_ptr(),
        )
        plan = self._plan(queries, layout, query.shape[1])
        self._kernels.attend(plan.open(self._kernels), ctypes.addressof(args))
        return output

    def merge(self, call: AttentionCall, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the result [T, H, V] of all ranks' partial sums, added in the order of ranks."""
        num_parts, num_rows, num_heads, width = parts.shape
        output = parts.new_empty(num_rows, num_heads, width - EXTRA, dtype=dtype)
        args = MergeArgs(
            parts=parts.data_ptr(),
            output=output.data_ptr(),
            sinks=None if call.sinks is None else call.sinks.data_ptr(),
            rows=num_rows,
            num_parts=num_parts,
            heads=num_heads,
            value_dim=width - EXTRA,
            is_bf16=dtype == torch.bfloat16,
            threads=torch.get_num_threads(),
        )
        self._kernels.merge_parts(ctypes.addressof(args))
        return output

    def close(self) -> None:
        """Free the native plans."""
        for _, plan in self._plans.values():
            plan.free(self._kernels)
        self._plans.clear()

    def _plan(self, queries: Queries, layout: KVLayout, num_heads: int) -> NativePlan:
        key = id(queries), layout.num_kv_heads, num_heads
        if key not in self._plans:
            planned = PlannedQueries(queries.starts, queries.num_keys, queries.tables, queries.limits)
            heads = layout.num_kv_heads, num_heads // layout.num_kv_heads
            self._plans[key] = queries, NativePlan(planned, layout.block_size, *heads)
        return self._plans[key][1]


class TorchPartials:
    """torch alone: where there are no kernels, and the reference of the kernels' results."""

    def __init__(self, value_dim: int) -> None:
        """`value_dim`: of the model's values; of latents it isn't used."""
        self._value_dim = value_dim

    def attend(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        source: LayerSource,
        queries: Queries,
        lows: npt.NDArray[np.int32] | None,
    ) -> torch.Tensor:
        """Return partial sums [T, H, V + 2] in float32 of the keys that this rank holds."""
        value_dim = value_dim_of(call, self._value_dim)
        output = query.new_zeros(*query.shape[:2], value_dim + EXTRA, dtype=torch.float32)
        all_keys = KVRows(source, call.layer_idx, 0, query.shape[2])
        all_values = None if call.latent is not None else KVRows(source, call.layer_idx, 1, value_dim)
        for seq, num_keys in enumerate(queries.num_keys.tolist()):
            if not num_keys:
                continue
            rows = slice(*queries.starts[seq : seq + 2].tolist())
            num_blocks = -(-num_keys // source.layout.block_size)
            blocks = torch.from_numpy(queries.tables[seq, :num_blocks].astype(np.int64)).to(query.device)
            keys = all_keys.gather(blocks).flatten(0, 1)[:num_keys].float()
            values = keys[..., :value_dim]
            if all_values is not None:
                values = all_values.gather(blocks).flatten(0, 1)[:num_keys].float()
            numbers = torch.arange(num_keys, device=query.device)
            is_seen = numbers < torch.from_numpy(queries.limits[rows]).to(query.device)[:, None]
            if lows is not None:
                is_seen &= numbers >= torch.from_numpy(lows[rows]).to(query.device)[:, None]
            output[rows] = _partial(call, query[rows].float(), keys, values, is_seen)
        return output

    def merge(self, call: AttentionCall, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the result [T, H, V] of all ranks' partial sums, added in the order of ranks."""
        maximum, total, values = parts[0, ..., :1], parts[0, ..., 1:2], parts[0, ..., 2:]
        more = [(part[..., :1], part[..., 1:2], part[..., 2:]) for part in parts[1:]]
        if call.sinks is not None:
            sinks = call.sinks[None, :, None].expand_as(maximum)
            more.append((sinks, torch.ones_like(sinks), torch.zeros_like(values)))
        for next_maximum, next_total, next_values in more:
            lowest = torch.full_like(maximum, -torch.inf)
            first = torch.where(total > 0, maximum, lowest)
            second = torch.where(next_total > 0, next_maximum, lowest)
            top = torch.maximum(first, second).nan_to_num(neginf=0.0)
            before, now = (first - top).exp(), (second - top).exp()
            maximum, total = top, total * before + next_total * now
            values = values * before + next_values * now
        return (values / total).to(dtype)

    def close(self) -> None:
        """Do nothing: torch keeps nothing between steps."""


def _partial(
    call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_seen: torch.Tensor
) -> torch.Tensor:
    """q [n, H, D] over k [C, Hk, D], v [C, Hk, Dv], mask [n, C] -> [n, H, Dv + 2], all float32."""
    packed = query.view(len(query), keys.shape[1], -1, query.shape[2])
    scores = torch.einsum("nkgd,ckd->nkgc", packed, keys) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~is_seen[:, None, None], -torch.inf)
    maximum = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - maximum).exp()
    weighted = torch.einsum("nkgc,ckd->nkgd", weights, values)
    return torch.cat((maximum, weights.sum(-1, keepdim=True), weighted), dim=-1).flatten(1, 2)
