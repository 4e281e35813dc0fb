"""The parts of a layout's layers on a device: each takes its weights, and then states, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import AttentionCall
from stemma.model.cpu.packing import in_one_form
from stemma.model.cuda.coded_kv import rows_of, stored_constants
from stemma.model.cuda.layer_kernels import add_and_norm, gate_attended, prepare_heads
from stemma.model.cuda.low_rank import DOWN, GATE_UP, INPUTS, AdapterStep, activate_both
from stemma.model.cuda.products import CodedWeight, Gate, Sums, Weight
from stemma.model.cuda.state_list import StateList
from stemma.model.families import layout
from stemma.model.weights.joining import below_each_other
from stemma.model.weights.named import NamedWeights
from stemma.model.weights.quantized import QuantizedWeight

_ANGLES_AT_ONCE = 16_384
_GATED, _WIDE = 512, 2048
"""Numbers from which on a row is shared by more threads."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Brings weights to the device by their names."""

    weights: NamedWeights
    dtype: torch.dtype
    device: torch.device

    def linears(self, *linears: layout.Linear) -> tuple[torch.Tensor | CodedWeight, torch.Tensor | None]:
        """Return the weights below each other, and their biases, zeros where some have none."""
        found, biases = [self.weights.bias(linear) for linear in linears], None
        if any(bias is not None for bias in found):
            filled = [
                torch.zeros(linear.outputs, dtype=self.dtype) if bias is None else bias
                for linear, bias in zip(linears, found, strict=True)
            ]
            biases = torch.cat(filled).to(self.device)
        floats = [coded for linear in linears if (coded := self.weights.coded(linear)) is not None]
        if len(floats) == len(linears) and len({coded.group_size for coded in floats}) == 1:
            return CodedWeight.of_floats(floats, self.device), biases
        weights = in_one_form([self.weights.affine(linear).weight for linear in linears])
        codes = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        if codes:
            order = torch.arange(sum(weight.shape[0] for weight in codes))
            return CodedWeight.of(below_each_other(codes, order), self.dtype, self.device), biases
        plain = [weight.to(self.device) for weight in weights if isinstance(weight, torch.Tensor)]
        return plain[0] if len(plain) == 1 else torch.cat(plain), biases

    def tensor(self, name: str) -> torch.Tensor:
        """Return a weight's numbers."""
        return self.weights.tensor(name).to(self.device)

    def product(self, *linears: layout.Linear, order: Sequence[int] | None = None) -> Weight:
        """Return the product of several layers, side by side, or its outputs in this order."""
        weight, bias = self.linears(*linears)
        if order is not None:
            chosen = torch.tensor(order, device=self.device)
            weight = weight[chosen] if isinstance(weight, torch.Tensor) else weight.reordered(chosen)
            bias = None if bias is None else bias[chosen]
        return Weight(weight, bias)

    def floats(self, name: str) -> torch.Tensor:
        """Return a tensor in float32."""
        return self.weights.floats(name).to(self.device)

    def norm(self, norm: layout.Norm) -> RowNorm:
        """Return a norm."""
        return RowNorm(self.weights.norm(norm).to(self.device), norm.eps, norm.in_floats)


@dataclass(frozen=True, slots=True)
class RowNorm:
    """An RMS norm of rows."""

    weight: torch.Tensor
    """[size]."""
    eps: float
    in_floats: bool

    def columns(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Norm columns of x [T, width] from `first` on, [T, size]."""
        return self._run(None, Sums(x, 1, None, x.dtype), None, first=first)

    def residual(
        self, residual: torch.Tensor, delta: Sums | None, delta_norm: RowNorm | None, scale: float
    ) -> torch.Tensor:
        """Add `delta`, normed and times `scale`, to the residual [T, size] in its place; return its norm."""
        return self._run(residual, delta, delta_norm, scale=scale)

    def _run(
        self,
        residual: torch.Tensor | None,
        delta: Sums | None,
        delta_norm: RowNorm | None,
        *,
        first: int = 0,
        scale: float = 1.0,
    ) -> torch.Tensor:
        source = residual if delta is None else delta.numbers
        assert source is not None
        size, (num_rows, width) = len(self.weight), source.shape[-2:]
        normed = torch.empty(
            num_rows, size, dtype=source.dtype if delta is None else delta.dtype, device=source.device
        )
        kernel: Any = add_and_norm[(num_rows,)]
        kernel(
            normed if residual is None else residual,
            *((source, source) if delta is None else delta.arguments()),
            self.weight if delta_norm is None else delta_norm.weight,
            self.weight,
            normed,
            num_rows * width,
            width,
            first,
            size,
            self.eps,
            0.0 if delta_norm is None else delta_norm.eps,
            scale,
            **({"PIECES": 1, "HAS_BIAS": False} if delta is None else delta.constants()),
            HAS_RESIDUAL=residual is not None,
            HAS_DELTA=delta is not None,
            NORMS_DELTA=delta_norm is not None,
            SCALES=scale != 1.0,
            IN_FLOATS=self.in_floats,
            BLOCK=triton.next_power_of_2(size),
            num_warps=8 if size >= _WIDE else 4,
        )
        return normed


class AttentionReader(Protocol):
    """Attends to KV that is written; `ListedAttentionStep` does."""

    slots: torch.Tensor
    """[T] int64: where each row's KV is to be written; negative: nowhere."""

    def read(self, call: AttentionCall, query: torch.Tensor, value_dim: int | None = None) -> torch.Tensor:
        """Take q [T, H, D]; return what it attends to, [T, H, values]: as those of `ListedAttentionStep`."""


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What layers write their KV to, and attend with."""

    reader: AttentionReader
    kv: DeviceKV
    adapters: AdapterStep | None = None
    states: StateList | None = None
    """Of a model with recurrent layers."""

    @property
    def listed(self) -> StateList:
        """The states, where there are some."""
        assert self.states is not None
        return self.states

    def adapted(self, layer: int, product: int, x: torch.Tensor, sums: Sums) -> Sums:
        """Add what adapters do to what a layer's product of x [T, K] left."""
        return sums if self.adapters is None else self.adapters.add(5 * layer + product, x, sums)

    def stored(self) -> dict[str, int]:
        """Return what kernels that write KV are compiled for."""
        return stored_constants(self.kv.layout)

    def place(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots of the rows and a layer's cache, as kernels take them."""
        return self.reader.slots, rows_of(self.kv, number)


class Attention(Protocol):
    """What a layer does before its output product."""

    def __call__(self, normed: torch.Tensor, positions: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Take normed states [T, H] and positions [T], or [3, T] where angles have axes; return what is
        attended, [T, inputs of the output]."""


class HeadAttention:
    """Heads of queries, on fewer heads of keys and values."""

    def __init__(
        self,
        number: int,
        kv_number: int,
        layer: layout.Layer,
        heads: layout.GroupedHeads,
        angles: torch.Tensor,
        load: OnDevice,
    ) -> None:
        """`angles`: see `angle_table`; `kv_number`: of the layer among those with KV."""
        self._number, self._has_gates = number, layer.has_gates
        self._qkv = load.product(*layer.inputs, order=layer.order)
        self._heads, self._angles = heads, angles
        self._axes = torch.tensor(heads.axes, dtype=torch.int32, device=angles.device)
        self._rotary = 2 * angles.shape[2] if layer.rotates else 0
        self._norms = [load.norm(norm) for norm in layer.head_norms or ()]
        sinks = None if layer.sinks is None else load.floats(layer.sinks.name)
        self._call = AttentionCall(
            kv_number, layer.scaling, layer.window, None, None, sinks, rotates=layer.rotates
        )

    def __call__(self, normed: torch.Tensor, positions: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Attend."""
        sums = step.adapted(self._number, INPUTS, normed, self._qkv(normed))
        query = self._prepare(sums, positions, step)
        attended = step.reader.read(self._call, query).flatten(1)
        return through_gates(attended, sums) if self._has_gates else attended

    def _prepare(self, sums: Sums, positions: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Norm and rotate; write keys and values to the cache and return queries, [T, heads, D]."""
        slots, cache = step.place(self._call.layer_idx)
        shape, dim, (num_tokens, width) = self._heads, self._heads.head_dim, sums.shape
        query = torch.empty(*(num_tokens, shape.num_heads, dim), dtype=sums.dtype, device=sums.numbers.device)
        norms = [norm.weight for norm in self._norms] or [query, query]
        kernel: Any = prepare_heads[(num_tokens, shape.num_heads + 2 * shape.num_kv_heads)]
        kernel(
            *sums.arguments(),
            *norms,
            self._angles,
            self._axes if len(self._axes) else slots,
            positions,
            slots,
            query,
            cache,
            num_tokens * width,
            width,
            shape.num_heads,
            shape.num_kv_heads,
            self._angles.shape[1],
            positions.stride(0),
            self._norms[0].eps if self._norms else 0.0,
            *cache.stride()[:4],
            BLOCK_SIZE=cache.shape[2],
            **sums.constants(),
            DIM=dim,
            ROTARY=self._rotary,
            HAS_AXES=len(self._axes) > 0,
            NORMS=bool(self._norms),
            IN_FLOATS=bool(self._norms) and self._norms[0].in_floats,
            BLOCK=triton.next_power_of_2(dim),
            **step.stored(),
            num_warps=1,
        )
        return query


def through_gates(attended: torch.Tensor, sums: Sums) -> torch.Tensor:
    """Return what is attended, [T, N], times the sigmoids of gates, the last N numbers of a product."""
    y, (num_tokens, width) = torch.empty_like(attended), sums.shape
    columns = attended.shape[1]
    kernel: Any = gate_attended[(num_tokens, triton.cdiv(columns, _GATED))]
    given = (num_tokens * width, width, width - columns, columns)
    kernel(attended, *sums.arguments(), y, *given, **sums.constants(), BLOCK=_GATED)
    return y


class GatedMLP:
    """down(activation(gate x) * up x)."""

    def __init__(self, number: int, gated: layout.Gated, load: OnDevice) -> None:
        self._number = number
        self._gate_up = Weight(*load.linears(gated.gate, gated.up), gate=gate_of(gated))
        self._down = load.product(gated.down)

    def __call__(self, x: torch.Tensor, step: LayerStep) -> Sums:
        """Take normed states [T, H]."""
        if step.adapters is None:
            return self._down(self._gate_up(x).numbers)
        both, gate = self._gate_up.ungated(x)
        step.adapted(self._number, GATE_UP, x, Sums(both, 1, None, both.dtype))
        inner = activate_both(both, gate)
        return step.adapted(self._number, DOWN, inner, self._down(inner))


def gate_of(gated: layout.Gated) -> Gate:
    """Return how a layer's gates and ups become one."""
    if gated.clamped is not None:
        return Gate(3, gated.clamped.sharpness, gated.clamped.limit)
    return Gate(2 if gated.is_gelu else 1)


def angle_table(
    make: Callable[[], layout.Angles], num_positions: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return cosines and sines of all positions, [2, positions, angles].

    A layer looks its tokens' up by their positions, which no recorded step could compute from.
    """
    angles, like, tables = make(), torch.empty(0, dtype=dtype), []
    for first in range(0, num_positions, _ANGLES_AT_ONCE):
        positions = torch.arange(first, min(first + _ANGLES_AT_ONCE, num_positions))[None]
        made = angles(like, positions)
        if isinstance(made, torch.Tensor):  # complex numbers
            both = torch.stack((made.real, made.imag))
        else:  # both halves of a head have the same angles
            both = torch.stack(tuple(part[..., : part.shape[-1] // 2] for part in made))
        tables.append(both[:, 0].to(device))
    return torch.cat(tables, dim=1).contiguous()
