"""Choosing tokens on CPU, in native code (native/selection.h)."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from stemma.memory.device.kv import DeviceKV
from stemma.model.batch import ForwardBatch
from stemma.model.selection import Selection
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
    weights = selection.scoring.weights
    padding = -weights.shape[1] % _LANES
    query = F.pad(selection.scoring.query.transpose(1, 2), (0, padding)).contiguous()
    weights = F.pad(weights, (0, padding)).contiguous()
    starts = np.array(batch.query_starts, dtype=np.int32)
    num_keys = np.array(batch.context_lens, dtype=np.int32)
    tables = np.ascontiguousarray(batch.block_tables.numpy(), dtype=np.int32)
    places = np.zeros((len(query), selection.top_k), dtype=np.int32)
    counts = np.zeros(len(query), dtype=np.int32)
    first_column = (kv.layout.head_dim - selection.dim) * kv.data.element_size()
    args = SelectionArgs(
        query=query.data_ptr(),
        weights=weights.data_ptr(),
        keys=kv.address(layer, 0) + first_column,
        places=places.ctypes.data,
        counts=counts.ctypes.data,
        starts=starts.ctypes.data,
        num_keys=num_keys.ctypes.data,
        tables=tables.ctypes.data,
        table_stride=tables.shape[1],
        block_stride=kv.block_stride,
        token_stride=kv.token_stride,
        num_sequences=len(num_keys),
        block_size=kv.layout.block_size,
        heads=weights.shape[1],
        dim=selection.dim,
        top_k=selection.top_k,
        is_bf16=kv.data.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
    )
    kernels.select_tokens(ctypes.addressof(args))
    return places, counts
