"""Linear layers over packed weights.

Decode reads every weight once a token, so reading memory bounds its speed.
Weights are packed at load, by all threads, into the strips that our products read at every instruction-set
level (native/strips.h), and those of bfloat16 compressed where the level reads them so (compressed.py). The
packed weight replaces the plain one: memory doesn't double. A row's result never depends on the rows
beside it. Without kernels layers stay as they are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch

from stemma.model.cpu.codes import PackedCodes
from stemma.model.cpu.compressed import CompressedWeight, can_compress, compress
from stemma.model.cpu.weight_memory import weight_memory
from stemma.model.weights.quantized import QuantizedWeight
from stemma.native.library import Kernels
from stemma.native.structures import MultiplyArgs, PackArgs, Strips

# Without our kernels oneDNN multiplies. It prepares a product anew for each number of rows, and it and torch
# each remember the last 1,024 of them, at 0.4 MB apiece: a server that had seen 384 sizes of batches held
# 1.1 GB. Both read these at the first product.
_NUM_PREPARED = 64
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, str(_NUM_PREPARED))
PREPARED_BYTES = _NUM_PREPARED * 420_000
"""Memory of oneDNN's prepared products once a server has seen many batch sizes."""


def can_pack(weight: torch.Tensor) -> bool:
    """Whether our products take this weight, [out_features, in_features]: on CPU, float32 or bfloat16.

    In bfloat16 inputs go in pairs, so their number must be even.
    """
    if weight.device.type != "cpu" or weight.dim() != 2 or 0 in weight.shape:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0)


class PackedProduct:
    """x [T, in_features] -> x W^T + b, [T, out_features], over a packed copy of W."""

    strips: Strips
    """Where the kernels find the weight; valid as long as this object."""

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[torch.Tensor | QuantizedWeight],
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        num_threads: int | None = None,
        *,
        compressed: bool = True,
    ) -> None:
        """Pack `weights` below each other: [n_i, in_features] each, all plain or all quantized.

        `bias`: [sum of n_i]. Inputs and outputs are of `dtype`; default: that of the plain weights. Those
        are packed by `num_threads` (default: torch's number), and compressed where the kernels read them so.
        """
        self.out_features = sum(weight.shape[0] for weight in weights)
        self.in_features = weights[0].shape[1]
        self._kernels = kernels
        plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        assert not (plain and quantized)
        self.dtype = plain[0].dtype if plain else dtype or torch.bfloat16
        self._is_bf16 = self.dtype == torch.bfloat16
        self._compressed: CompressedWeight | None = None
        if plain:
            self.bias = None if bias is None else bias.detach().to(self.dtype).contiguous()
            self._hold(plain, num_threads or torch.get_num_threads(), compressed)
        else:
            codes = PackedCodes(kernels, quantized, bias)
            self.strips, self.bias, self._room = codes.strips, codes.bias, codes.room

    @property
    def is_compressed(self) -> bool:
        """Whether a plain weight is kept in twelve bits a number."""
        return self._compressed is not None

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return self._room.nbytes if self._compressed is None else self._compressed.num_bytes

    def _hold(self, weights: Sequence[torch.Tensor], num_threads: int, compressed: bool) -> None:
        """Keep plain weights in the form that the kernels read."""
        assert all(can_pack(weight) for weight in weights)
        weights = [w.detach() if w.stride(1) == 1 else w.detach().contiguous() for w in weights]
        kernels, bias = self._kernels, None if self.bias is None else self.bias.data_ptr()
        strips = Strips(None, bias, self.out_features, self.in_features)
        if compressed and can_compress(kernels, strips, self.dtype):
            sources = self._sources(weights, strips, num_threads)
            self._compressed = compress(kernels, sources, strips, num_threads)
            if self._compressed is not None:
                self.strips = self._compressed.strips
                return
        self._room = weight_memory(kernels.packed_bytes(ctypes.addressof(strips), self._is_bf16))
        strips.data = self._room.data_ptr()
        for source in self._sources(weights, strips, num_threads):
            kernels.pack(ctypes.addressof(source))
        self.strips = strips

    def _sources(self, weights: Sequence[torch.Tensor], strips: Strips, num_threads: int) -> list[PackArgs]:
        """Return how each weight becomes its part of `strips`."""
        sources, first = [], 0
        for weight in weights:
            where, stride, rows = weight.data_ptr(), weight.stride(0), weight.shape[0]
            sources.append(PackArgs(where, stride, rows, first, strips, self._is_bf16, num_threads))
            first += rows
        return sources

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; no rows are fine."""
        if x.stride(1) != 1:
            x = x.contiguous()
        output = x.new_empty(x.shape[0], self.out_features)
        self.into(x, output)
        return output

    def into(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Multiply x [T, in_features] into `output` [T, out_features]; rows of both may lie apart."""
        assert x.dtype == output.dtype == self.dtype
        assert x.stride(1) == output.stride(1) == 1
        args = MultiplyArgs(
            self.strips,
            x.data_ptr(),
            output.data_ptr(),
            x.stride(0),
            output.stride(0),
            x.shape[0],
            self._is_bf16,
            torch.get_num_threads(),
        )
        self._kernels.multiply(ctypes.addressof(args))

    def take_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the plain weight, [len(ids), in_features]; `ids` are int64. Raises IndexError."""
        ids = ids.contiguous()
        if len(ids) and not 0 <= int(ids.amin()) <= int(ids.amax()) < self.out_features:
            raise IndexError(f"rows outside 0..{self.out_features - 1}")
        rows = torch.empty(len(ids), self.in_features, dtype=self.dtype)
        self._kernels.take_rows(
            ctypes.addressof(self.strips),
            ids.data_ptr(),
            len(ids),
            rows.data_ptr(),
            self._is_bf16,
            torch.get_num_threads(),
        )
        return rows
