"""A recurrent layer's weights beside its products, as the step's call reads them (native/recurrent.h)."""

from __future__ import annotations

import numpy as np
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import StateLayout, StatePart
from stemma.model.attend.batch import ForwardBatch
from stemma.model.families import layout
from stemma.model.weights.named import NamedWeights
from stemma.native.structures import RecurrentWeights, StateRows

CONV, RECURRENT = "conv", "recurrent"


class FusedRecurrent:
    """The weights of one layer."""

    def __init__(self, layer: layout.Recurrent, weights: NamedWeights) -> None:
        self._layer = layer
        self._convolution = weights.floats(f"{layer.path}.conv1d.weight")[:, 0].T.contiguous()
        self._conv_bias = weights.floats(f"{layer.path}.conv1d.bias") if layer.has_conv_bias else None
        self._rate = -weights.floats(f"{layer.path}.A_log").exp()
        self._step_bias = weights.floats(f"{layer.path}.dt_bias")
        self._skip = weights.floats(f"{layer.path}.D") if layer.has_skip else None
        self._norm = weights.floats(f"{layer.norm.name}.weight")

    def weights(self, conv_offset: int, scan_offset: int) -> RecurrentWeights:
        """Describe them to the kernels; valid as long as this object.

        Offsets are those of the layer's parts in a state, in bytes.
        """
        layer = self._layer
        return RecurrentWeights(
            kind=layer.kind,
            heads=layer.heads,
            key_heads=layer.key_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            conv_width=layer.conv_width,
            conv_at=layer.conv_at,
            gate_at=layer.gate_at,
            step_at=layer.step_at,
            beta_at=layer.beta_at,
            norm_dim=layer.norm_dim,
            gates_first=layer.gates_first,
            conv_weight=self._convolution.data_ptr(),
            conv_bias=None if self._conv_bias is None else self._conv_bias.data_ptr(),
            step_bias=self._step_bias.data_ptr(),
            rate=self._rate.data_ptr(),
            skip=None if self._skip is None else self._skip.data_ptr(),
            norm=self._norm.data_ptr(),
            norm_size=len(self._norm),
            conv_offset=conv_offset,
            scan_offset=scan_offset,
            eps=layer.norm.eps,
            least_step=layer.step_limits[0],
            most_step=layer.step_limits[1],
        )


def state_layout_of(model: layout.ModelLayout) -> StateLayout | None:
    """Return what the recurrent layers of a model keep of a sequence; None: there are none."""
    parts: list[StatePart] = []
    for number, layer in enumerate(model.layers):
        if (one := layer.recurrent) is not None:
            parts.append(StatePart(number, CONV, (one.conv_width - 1, one.channels)))
            parts.append(StatePart(number, RECURRENT, (one.heads, one.key_dim, one.value_dim)))
    return StateLayout(tuple(parts)) if parts else None


class StepStates:
    """Where the states of one step's sequences lie; valid as long as this object."""

    def __init__(self, batch: ForwardBatch, kv: DeviceKV) -> None:
        moves = batch.states
        assert moves is not None
        initial = [0 if state is None else kv.state_address(state) for state in moves.initial]
        self._arrays = [
            np.array(values, dtype=np.int64)
            for values in (
                batch.query_starts,
                initial,
                [kv.state_address(state) for state in moves.last],
                [row for row, _ in moves.snapshots],
                [kv.state_address(state) for _, state in moves.snapshots],
            )
        ]
        starts, initial_at, last, rows, snapshots = (array.ctypes.data for array in self._arrays)
        self.rows = StateRows(
            starts=starts,
            initial=initial_at,
            last=last,
            snapshot_rows=rows,
            snapshots=snapshots,
            num_sequences=len(moves.last),
            num_snapshots=len(moves.snapshots),
            threads=torch.get_num_threads(),
        )


def offsets_of(states: StateLayout | None, number: int) -> tuple[int, int]:
    """Return where the parts of layer `number` begin in a state, in bytes."""
    assert states is not None
    offsets = states.offsets()
    return offsets[number, CONV], offsets[number, RECURRENT]
