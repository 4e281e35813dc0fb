"""Products of hidden states with weights, whose rows have the same bits in any batch.

A weight is cut into pieces of its inputs by its own shape, never by the tokens. What few tokens leave are
the sums of each piece, which the kernel that reads them adds, with the bias: it takes `Sums`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from stemma.model.cuda.product_kernels import join, product
from stemma.model.weights.fields import bytes_of
from stemma.model.weights.multiples import numbers_of
from stemma.model.weights.quantized import QuantizedWeight
from stemma.model.weights.stored import CodedFloats

BLOCK_K = 64
FEW_TOKENS = 128
_MULTIPROCESSORS = 132
_MOST_PIECES = 16
_JOINED = 1024
_WIDE_TOKENS = 32
"""Tokens of a tile in float32, which tensor cores don't multiply without rounding."""
_COPIED = 16
"""Bytes that rows begin at multiples of, for the copy engine."""
ROUND = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The tiles of one launch."""

    block_n: int
    block_t: int
    num_warps: int
    num_stages: int
    is_apart: bool
    """Whether each piece is a program of its own."""


def num_pieces(n: int, k: int) -> int:
    """Return the pieces of K for a weight ``[n, k]``: at least two waves of programs where tokens are few."""
    tiles, steps = -(-n // 64), -(-k // BLOCK_K)
    fit = [pieces for pieces in range(1, _MOST_PIECES + 1) if steps % pieces == 0]
    return next((pieces for pieces in fit if tiles * pieces >= 2 * _MULTIPROCESSORS), fit[-1])


def launch_of(
    num_tokens: int, *, is_gated: bool = False, is_wide: bool = False, is_narrow: bool = False
) -> ProductTiles:
    """Return the tiles for so many tokens; the order of sums is that of any other number.

    `is_wide`: operands are float32. `is_narrow`: registers hold 64 rows, not 128.
    """
    block_t = max(16, min(128, 1 << (num_tokens - 1).bit_length()))
    if is_wide:
        return ProductTiles(64, min(block_t, _WIDE_TOKENS), 4, 2, is_apart=True)
    if num_tokens <= FEW_TOKENS:
        stages = 5 if block_t <= 32 else 4
        return ProductTiles(
            64, block_t, 8 if is_gated and block_t > 64 else 4, stages - is_gated, is_apart=True
        )
    return ProductTiles(64 if is_narrow else 128, block_t, 8, 3 - is_gated, is_apart=False)


@lru_cache(maxsize=16)
def has_warpgroups(device: torch.device) -> bool:
    """Return whether four warps of a device multiply together, out of shared memory."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


@dataclass(frozen=True, slots=True)
class Gate:
    """How a product's two halves become one: `activated` of product_kernels.py."""

    kind: int
    sharpness: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Sums:
    """What a product left of T tokens: its numbers, or the sums of its pieces."""

    numbers: torch.Tensor
    """[T, N], or [P, T, N] float32 of more pieces than one."""
    num_pieces: int
    bias: torch.Tensor | None
    """[N], to be added; None: nothing is, any more."""
    dtype: torch.dtype
    """What the whole numbers are rounded to."""

    @property
    def shape(self) -> torch.Size:
        """T and N."""
        return self.numbers.shape[-2:]

    def join(self) -> torch.Tensor:
        """Return the numbers, [T, N]."""
        if self.num_pieces == 1:
            return self.numbers
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.numbers.device)
        kernel: Any = join[(triton.cdiv(whole.numel(), _JOINED),)]
        kernel(*self.arguments(), whole, whole.numel(), whole.shape[1], **self.constants(), BLOCK=_JOINED)
        return whole

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what kernels read; where there is no bias, something that they don't."""
        return self.numbers, self.numbers if self.bias is None else self.bias

    def constants(self) -> dict[str, int | bool]:
        """Return what kernels are compiled for."""
        return {"PIECES": self.num_pieces, "HAS_BIAS": self.bias is not None}


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A quantized weight as `product` reads it: `decoded` of product_kernels.py."""

    codes: torch.Tensor
    """uint8 [.., rows, K / 2] of 4 bits, int8 [.., rows, K], or uint8 that are E4M3's."""
    scales: torch.Tensor
    """[.., rows, K / group size, rounded up] float32."""
    zeros: torch.Tensor | None
    minimums: torch.Tensor | None
    dtype: torch.dtype
    """Of what it is multiplied with, and what its numbers are rounded to."""
    inputs: int
    group_size: int
    shift: int = 0
    """What is taken off codes of 4 bits."""
    is_fp8: bool = False

    @classmethod
    def of(cls, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> CodedWeight:
        """Bring a weight to the device; inputs are multiplied as they are."""
        weight = weight.without_levels()
        codes, shift = bytes_of(weight.codes), 0
        inputs = codes.shape[1]
        if weight.bits == 4 and inputs % 2 == 0:
            shift = 0 if weight.is_unsigned else 8
            codes = (codes + shift).to(torch.uint8)
            codes = codes[:, ::2] | (codes[:, 1::2] << 4)
        zeros, minimums = weight.zero_points, weight.minimums
        return cls(
            codes.to(device),
            numbers_of(weight.scales).to(device),
            None if zeros is None else zeros.to(device),
            None if minimums is None else numbers_of(minimums).to(device),
            dtype,
            inputs,
            weight.group_size,
            shift,
        )

    @classmethod
    def of_floats(cls, weights: Sequence[CodedFloats], device: torch.device) -> CodedWeight:
        """Bring weights in FP8 with groups of one size to the device, below each other."""
        codes = torch.cat([weight.codes.view(torch.uint8) for weight in weights]).to(device)
        scales = torch.cat([weight.scales for weight in weights]).to(device)
        first = weights[0]
        return cls(codes, scales, None, None, first.dtype, codes.shape[1], first.group_size, is_fp8=True)

    def reordered(self, order: torch.Tensor) -> CodedWeight:
        """Return these of its rows."""
        zeros, minimums = (None if x is None else x[order] for x in (self.zeros, self.minimums))
        codes, scales = self.codes[order], self.scales[order]
        return replace(self, codes=codes, scales=scales, zeros=zeros, minimums=minimums)

    @classmethod
    def stacked(cls, weights: Sequence[CodedWeight]) -> CodedWeight:
        """Return weights of one form as several."""
        zeros = [weight.zeros for weight in weights if weight.zeros is not None]
        minimums = [weight.minimums for weight in weights if weight.minimums is not None]
        return replace(
            weights[0],
            codes=torch.stack([weight.codes for weight in weights]),
            scales=torch.stack([weight.scales for weight in weights]),
            zeros=torch.stack(zeros) if zeros else None,
            minimums=torch.stack(minimums) if minimums else None,
        )

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Return what the kernel reads."""
        zeros, minimums = self.zeros, self.minimums
        return (
            self.codes,
            self.scales,
            self.scales if zeros is None else zeros,
            self.scales if minimums is None else minimums,
        )

    def constants(self) -> dict[str, int | bool]:
        """Return what the kernel is compiled for."""
        return {
            "BITS": 4 if self.codes.dtype == torch.uint8 and not self.is_fp8 else 8,
            "IS_FP8": self.is_fp8,
            "SHIFT": self.shift,
            "GROUP_SIZE": self.group_size,
            "HAS_ZEROS": self.zeros is not None,
            "HAS_MINIMUMS": self.minimums is not None,
        }


_PLAIN: dict[str, int | bool] = {
    "BITS": 0,
    "IS_FP8": False,
    "SHIFT": 0,
    "GROUP_SIZE": 1,
    "HAS_ZEROS": False,
    "HAS_MINIMUMS": False,
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choices of T tokens, k each, in order of their experts."""

    order: torch.Tensor
    """[T * k] int64: choices, numbered token by token."""
    starts: torch.Tensor
    """[experts + 1] int64: where each expert's begin."""
    per_input: int
    """Choices that read one row of inputs: k, or 1."""


class Weight:
    """A weight ``[N, K]``, or several, ``[groups, N, K]``; with a gate ``[.., 2N, K]``, gates above ups."""

    def __init__(
        self, weight: torch.Tensor | CodedWeight, bias: torch.Tensor | None = None, gate: Gate | None = None
    ) -> None:
        """Take them on their device; `bias` has a number for each row."""
        self._codes = weight if isinstance(weight, CodedWeight) else None
        self._dtype = weight.dtype
        self._bias, self._gate = bias, gate
        self.inputs = weight.inputs if isinstance(weight, CodedWeight) else weight.shape[-1]
        weight = weight.codes if isinstance(weight, CodedWeight) else weight
        self._weight, rows = weight.contiguous(), weight.shape[-2]
        self.outputs = rows // 2 if gate else rows
        is_one = weight.dim() == 2 and gate is None
        self._num_pieces = num_pieces(self.outputs, self.inputs) if is_one else 1

    def __call__(self, x: torch.Tensor) -> Sums:
        """Multiply x [T, K], whose rows may lie apart."""
        num_tokens, launch = x.shape[0], self._launch(x.shape[0], x.device)
        is_cut = launch.is_apart and self._num_pieces > 1
        shape = (self._num_pieces, num_tokens, self.outputs) if is_cut else (num_tokens, self.outputs)
        numbers = x.new_empty(shape, dtype=torch.float32 if is_cut else self._dtype)
        grid = (
            triton.cdiv(self.outputs, launch.block_n) * triton.cdiv(num_tokens, launch.block_t),
            self._num_pieces if launch.is_apart else 1,
        )
        self._run(grid, launch, x, numbers)
        bias = self._bias if is_cut else None
        return Sums(numbers, self._num_pieces if is_cut else 1, bias, self._dtype)

    def ungated(self, x: torch.Tensor) -> tuple[torch.Tensor, Gate]:
        """Return gates and ups of x [T, K] side by side, [T, 2 N], and how they become one."""
        assert self._gate is not None
        both, launch = x.new_empty(len(x), 2 * self.outputs), self._launch(len(x), x.device)
        tiles = triton.cdiv(self.outputs, launch.block_n) * triton.cdiv(len(x), launch.block_t)
        self._run((tiles, 1), launch, x, both, gate=Gate(4))
        return both, self._gate

    def by_group(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Multiply x [T, groups, K] into y [T, groups, N], each group with its weight; rows may lie apart."""
        num_tokens, launch = x.shape[0], self._launch(x.shape[0], x.device)
        tiles = triton.cdiv(self.outputs, launch.block_n) * triton.cdiv(num_tokens, launch.block_t)
        self._run((tiles, 1, x.shape[1]), launch, x, y, groups=(x.stride(1), y.stride(1)))

    def by_expert(self, x: torch.Tensor, chosen: Chosen) -> torch.Tensor:
        """Multiply rows of x with the experts that chose them; return [choices, N]."""
        count, num_experts = len(chosen.order), self._weight.shape[0]
        launch = self._launch(min(FEW_TOKENS, max(1, 2 * count // num_experts)), x.device)
        y = x.new_empty(count, self.outputs)
        # Every expert may leave one tile that isn't full.
        num_tiles = min(count, count // launch.block_t + min(count, num_experts))
        self._run((num_tiles * triton.cdiv(self.outputs, launch.block_n),), launch, x, y, chosen=chosen)
        return y

    def _launch(self, num_tokens: int, device: torch.device) -> ProductTiles:
        is_gated, is_coded = self._gate is not None, self._codes is not None
        is_fp8 = self._codes is not None and self._codes.is_fp8
        return launch_of(
            num_tokens,
            is_gated=is_gated,
            is_wide=self._dtype == torch.float32,
            is_narrow=is_gated or is_coded if not has_warpgroups(device) else is_fp8 and not is_gated,
        )

    def _run(
        self,
        grid: tuple[int, ...],
        launch: ProductTiles,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        groups: tuple[int, int] = (0, 0),
        chosen: Chosen | None = None,
        gate: Gate | None = None,
    ) -> None:
        weight, n, k = self._weight, self.outputs, self.inputs
        of_group = weight.stride(0) if weight.dim() == 3 else 0
        codes = self._codes
        is_bulk = not launch.is_apart and chosen is None and groups == (0, 0) and codes is None
        is_bulk = is_bulk and _is_aligned(x, weight)
        if is_bulk:
            _allow_descriptors(x.device)
        gate = gate or self._gate or Gate(0)
        kernel: Any = product[grid]
        kernel(
            x,
            *((weight,) * 4 if codes is None else codes.arguments()),
            weight if self._bias is None else self._bias,
            y,
            y,
            y if chosen is None else chosen.starts,
            y if chosen is None else chosen.order,
            x.shape[0],
            n,
            k,
            x.stride(0),
            weight.stride(-2),
            y.stride(-3 if y.dim() == 3 and groups != (0, 0) else -2),
            groups[0],
            of_group,
            groups[1],
            1 if codes is None else codes.scales.shape[-1],
            gate.sharpness,
            gate.limit,
            **constants(n, k, launch, pieces=self._num_pieces, is_bulk=is_bulk, widen=x.device.type == "cpu"),
            **(_PLAIN if codes is None else codes.constants()),
            HAS_BIAS=self._bias is not None,
            GATE=gate.kind,
            EXPERTS=0 if chosen is None else weight.shape[0],
            PADDED=1 if chosen is None else triton.next_power_of_2(weight.shape[0]),
            CHOSEN=1 if chosen is None else chosen.per_input,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )


def constants(
    n: int, k: int, launch: ProductTiles, *, pieces: int, is_bulk: bool, widen: bool
) -> dict[str, int | bool]:
    """Return what `product` is compiled for, of a weight ``[n, k]`` and its tiles."""
    steps = -(-k // BLOCK_K)
    return {
        "PIECE": steps // pieces * BLOCK_K,
        "PIECES": pieces,
        "BLOCK_N": launch.block_n,
        "BLOCK_T": launch.block_t,
        "BLOCK_K": BLOCK_K,
        "APART": launch.is_apart,
        "GROUP": 8,
        "WIDEN": widen,
        "BULK": is_bulk,
        "EVEN_N": n % launch.block_n == 0,
        "EVEN_K": k % BLOCK_K == 0,
    }


def _allow_descriptors(device: torch.device) -> None:
    """Give Triton the memory that its descriptors of tiles need; it asks the thread that launches."""
    triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device))


def _is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether rows begin where the copy engine can."""
    return all(
        tensor.data_ptr() % _COPIED == 0 and tensor.stride(-2) * tensor.element_size() % _COPIED == 0
        for tensor in tensors
    )
