"""Choosing tokens on CPU, in native code (native/selection.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.selection import Selection, TokenScores
from stemma.native.library import Kernels
from stemma.native.structures import SelectionArgs

_LANES = 16
"""Heads that are scored together: LANES of native/vec.h."""


def select(
    kernels: Kernels, selection: Selection, layer: int, batch: ForwardBatch, kv: DeviceKV
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the places of the tokens that each row sees in a layer, [T, top_k], and how many, [T].

    A place counts the layer's rows from its first one on. The KV of the batch's tokens is written already.
    """
    assert selection.scoring is not None
    starts = np.array(batch.query_starts, dtype=np.int32)
    num_keys = np.array(batch.context_lens, dtype=np.int32)
    tables = np.ascontiguousarray(batch.block_tables.numpy(), dtype=np.int32)
    keys = IndexKeys(
        kv.address(layer, 0) + (kv.layout.head_dim - selection.dim) * kv.data.element_size(),
        kv.block_stride,
        kv.token_stride,
        kv.layout.block_size,
        is_bf16=kv.data.dtype == torch.bfloat16,
    )
    return choose_among(kernels, selection, selection.scoring, keys, starts, num_keys, tables)


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """Where the index keys of a layer lie."""

    address: int
    """Of the first one."""
    block_stride: int
    """In elements."""
    token_stride: int
    block_size: int
    is_bf16: bool


def choose_among(
    kernels: Kernels,
    selection: Selection,
    scoring: TokenScores,
    keys: IndexKeys,
    starts: npt.NDArray[np.int32],
    num_keys: npt.NDArray[np.int32],
    tables: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the places of the keys that each row of S sequences sees, [T, top_k], and how many, [T].

    `starts` [S + 1], `num_keys` [S] those up to its last row, `tables` [S, N], or [1, N] for all.
    """
    padding = -scoring.weights.shape[1] % _LANES
    query = F.pad(scoring.query.transpose(1, 2), (0, padding)).contiguous()
    weights = F.pad(scoring.weights, (0, padding)).contiguous()
    places = np.zeros((len(query), selection.top_k), dtype=np.int32)
    counts = np.zeros(len(query), dtype=np.int32)
    args = SelectionArgs(
        query=query.data_ptr(),
        weights=weights.data_ptr(),
        keys=keys.address,
        places=places.ctypes.data,
        counts=counts.ctypes.data,
        starts=starts.ctypes.data,
        num_keys=num_keys.ctypes.data,
        tables=tables.ctypes.data,
        table_stride=tables.shape[1] if len(tables) > 1 else 0,
        block_stride=keys.block_stride,
        token_stride=keys.token_stride,
        num_sequences=len(num_keys),
        block_size=keys.block_size,
        heads=weights.shape[1],
        dim=selection.dim,
        top_k=selection.top_k,
        is_bf16=keys.is_bf16,
        threads=torch.get_num_threads(),
    )
    kernels.select_tokens(ctypes.addressof(args))
    return places, counts
