"""Recurrent layers of a layout on a device: launches of `recurrent_kernels.py` behind an input product."""

from __future__ import annotations

from typing import Any

import torch
import triton

from stemma.memory.device.layout import StateLayout
from stemma.model.cpu.recurrent_layer import offsets_of
from stemma.model.cuda.layers import LayerStep, OnDevice
from stemma.model.cuda.low_rank import INPUTS
from stemma.model.cuda.products import ROUND, Sums
from stemma.model.cuda.recurrent_kernels import convolve, gate_and_norm, keep_inputs, scan
from stemma.model.families import layout

_COLUMNS = 8
"""Columns of a state that a warp takes through the rows: 32 bytes of each of its rows."""
_KEYS = 256
"""Rows of a state, at most, for a warp."""
_PROGRAMS = 32
"""Sequences at a time: a few thousand programs fill any card, and the others wait in turn."""
_CHANNELS = 512
_WIDE = 2048
"""Numbers from which on a norm is shared by more threads."""


class RecurrentLayer:
    """A layer that keeps a state of a sequence; see native/recurrent.h."""

    def __init__(self, number: int, layer: layout.Layer, states: StateLayout | None, load: OnDevice) -> None:
        """`states`: of the whole model."""
        assert layer.recurrent is not None
        self._number, self._one = number, (one := layer.recurrent)
        self._inputs = load.product(*layer.inputs, order=layer.order)
        self._conv_at, self._scan_at = (offset // 4 for offset in offsets_of(states, number))
        self._conv_weight = load.floats(f"{one.path}.conv1d.weight")[:, 0].T.contiguous()
        self._conv_bias = load.floats(f"{one.path}.conv1d.bias") if one.has_conv_bias else None
        self._step_bias = load.floats(f"{one.path}.dt_bias")
        self._rate = -load.floats(f"{one.path}.A_log").exp()
        self._skip = load.floats(f"{one.path}.D") if one.has_skip else None
        self._norm = load.floats(f"{one.norm.name}.weight")
        self._is_delta = one.kind == layout.RecurrentKind.DELTA_RULE
        self._shape = {"HEADS": one.heads, "KEY_HEADS": one.key_heads}
        self._shape |= {"KEY_DIM": one.key_dim, "VALUE_DIM": one.value_dim, "IS_DELTA": self._is_delta}

    def __call__(self, normed: torch.Tensor, positions: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Take normed states [T, H]; return what the output product takes, [T, heads * values]."""
        sums = step.adapted(self._number, INPUTS, normed, self._inputs(normed))
        mixed, factors = self._convolve(sums, step)
        scanned = self._scan(mixed, factors, step)
        self._keep_inputs(sums, step)
        return self._gate_and_norm(sums, scanned, mixed, step)

    def _convolve(self, sums: Sums, step: LayerStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return convolved channels [T, C], and what states keep and values count by, [T, 2, heads]."""
        one, (num_rows, width) = self._one, sums.shape
        mixed = self._floats(sums, one.channels)
        factors = self._floats(sums, 2, one.heads)
        kernel: Any = convolve[(num_rows, 2 * one.key_heads + one.heads + 1)]
        kernel(
            *sums.arguments(),
            self._conv_weight,
            self._conv_weight if self._conv_bias is None else self._conv_bias,
            self._step_bias,
            self._rate,
            step.listed.numbers,
            step.kv.floats,
            mixed,
            factors,
            num_rows * width,
            width,
            step.listed.rows_at,
            step.kv.layout.block_bytes,
            self._conv_at,
            *one.step_limits,
            one.key_dim**-0.5,
            **sums.constants(),
            ROUND=ROUND[sums.dtype],
            HAS_CONV_BIAS=one.has_conv_bias,
            **self._shape,
            WIDTH=one.conv_width,
            CONV_AT=one.conv_at,
            STEP_AT=one.step_at,
            BETA_AT=one.beta_at,
            BLOCK=triton.next_power_of_2(max(one.key_dim, one.value_dim)),
            HEADS_BLOCK=triton.next_power_of_2(one.heads),
            num_warps=1,
        )
        return mixed, factors

    def _scan(self, mixed: torch.Tensor, factors: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Advance the states; return what queries find, [T, heads * values] float32."""
        one, keys = self._one, triton.next_power_of_2(self._one.key_dim)
        scanned = mixed.new_empty(len(mixed), one.heads * one.value_dim)
        columns = triton.cdiv(one.value_dim, _COLUMNS)
        kernel: Any = scan[(min(len(mixed), _PROGRAMS), one.heads, columns)]
        kernel(
            step.listed.numbers,
            step.kv.floats,
            mixed,
            factors,
            scanned,
            *step.listed.places,
            step.kv.layout.block_bytes,
            self._scan_at,
            **self._shape,
            KEYS=keys,
            VALUES=_COLUMNS,
            num_warps=triton.cdiv(keys, _KEYS),
        )
        return scanned

    def _keep_inputs(self, sums: Sums, step: LayerStep) -> None:
        one, (num_rows, width) = self._one, sums.shape
        kernel: Any = keep_inputs[(min(num_rows, _PROGRAMS), triton.cdiv(one.channels, _CHANNELS))]
        kernel(
            *sums.arguments(),
            step.listed.numbers,
            step.kv.floats,
            num_rows * width,
            width,
            *step.listed.places,
            step.kv.layout.block_bytes,
            self._conv_at,
            **sums.constants(),
            ROUND=ROUND[sums.dtype],
            CHANNELS=one.channels,
            WIDTH=one.conv_width,
            CONV_AT=one.conv_at,
            BLOCK=_CHANNELS,
            num_warps=4,
        )

    def _gate_and_norm(
        self, sums: Sums, scanned: torch.Tensor, mixed: torch.Tensor, step: LayerStep
    ) -> torch.Tensor:
        one, (num_rows, width) = self._one, sums.shape
        output = torch.empty_like(scanned, dtype=sums.dtype)
        kernel: Any = gate_and_norm[(num_rows, scanned.shape[1] // one.norm_dim)]
        kernel(
            *sums.arguments(),
            scanned,
            mixed,
            self._norm if self._skip is None else self._skip,
            self._norm,
            step.listed.numbers,
            output,
            num_rows * width,
            width,
            step.listed.rows_at,
            one.norm.eps,
            **sums.constants(),
            HAS_SKIP=one.has_skip,
            GATES_FIRST=one.gates_first,
            VALUE_DIM=one.value_dim,
            CHANNELS=one.channels,
            VALUES=scanned.shape[1],
            GATE_AT=one.gate_at,
            NORM_DIM=one.norm_dim,
            NORM_SIZE=len(self._norm),
            BLOCK=triton.next_power_of_2(one.norm_dim),
            num_warps=8 if one.norm_dim >= _WIDE else 1 if one.norm_dim <= 256 else 4,
        )
        return output

    def _floats(self, sums: Sums, *shape: int) -> torch.Tensor:
        return torch.empty(sums.shape[0], *shape, dtype=torch.float32, device=sums.numbers.device)
