"""Recurrent layers on CPU, in native code (native/scan.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from stemma.model.attend.recurrence import SequenceRows
from stemma.native.library import Kernels
from stemma.native.structures import ConvolveArgs, ScanArgs, SelectiveArgs, StateRows


class NativeRecurrence:
    """Recurrent layers by the native kernels; tensors are float32 and contiguous."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def convolve(
        self,
        sequences: Sequence[SequenceRows],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_activated: bool,
    ) -> torch.Tensor:
        """Return the causal convolution of x [T, C] by weight [width, C]."""
        output, places = torch.empty_like(x), _Places(sequences)
        args = ConvolveArgs(
            rows=places.rows,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            output=output.data_ptr(),
            channels=x.shape[1],
            width=weight.shape[0],
            is_activated=is_activated,
        )
        self._kernels.convolve(ctypes.addressof(args))
        return output

    def scan(
        self,
        sequences: Sequence[SequenceRows],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return linear attention [T, H, V] of queries and keys [T, G, K] and values."""
        output, places = torch.empty_like(value), _Places(sequences)
        args = ScanArgs(
            rows=places.rows,
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            key_stride=key.stride(0),
            value_stride=value.stride(0),
            decay=decay.data_ptr(),
            beta=None if beta is None else beta.data_ptr(),
            output=output.data_ptr(),
            key_heads=key.shape[1],
            heads=value.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            decays_keys=decay.dim() == 3,
        )
        self._kernels.scan(ctypes.addressof(args))
        return output

    def select(
        self,
        sequences: Sequence[SequenceRows],
        x: torch.Tensor,
        step: torch.Tensor,
        rate: torch.Tensor,
        inputs: torch.Tensor,
        projection: torch.Tensor,
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the selective scan of a Mamba layer."""
        output, places = torch.empty_like(x), _Places(sequences)
        args = SelectiveArgs(
            rows=places.rows,
            x=x.data_ptr(),
            step=step.data_ptr(),
            rate=rate.data_ptr(),
            input=inputs.data_ptr(),
            projection=projection.data_ptr(),
            skip=None if skip is None else skip.data_ptr(),
            output=output.data_ptr(),
            channels=x.shape[1],
            state_dim=rate.shape[0],
        )
        self._kernels.select(ctypes.addressof(args))
        return output


class _Places:
    """The sequences of a step as the kernels want them; valid as long as this object."""

    def __init__(self, sequences: Sequence[SequenceRows]) -> None:
        starts = [one.rows.start for one in sequences] + [sequences[-1].rows.stop]
        snapshots = [snapshot for one in sequences for snapshot in one.snapshots]
        self._arrays = [
            np.array(values, dtype=np.int64)
            for values in (
                starts,
                [0 if one.initial is None else one.initial.data_ptr() for one in sequences],
                [one.last.data_ptr() for one in sequences],
                [row for row, _ in snapshots],
                [target.data_ptr() for _, target in snapshots],
            )
        ]
        starts_at, initial, last, snapshot_rows, targets = (array.ctypes.data for array in self._arrays)
        self.rows = StateRows(
            starts=starts_at,
            initial=initial,
            last=last,
            snapshot_rows=snapshot_rows,
            snapshots=targets,
            num_sequences=len(sequences),
            num_snapshots=len(snapshots),
            threads=torch.get_num_threads(),
        )
