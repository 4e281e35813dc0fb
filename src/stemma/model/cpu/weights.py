"""Linear layers over weights that we pack: the lever of decode on CPU.

Decode reads every weight once a token, so it runs at the speed of reading memory, if the kernel lets it.
Weights are packed at load, by all threads, into the strips that our products read at every instruction-set
level (native/strips.h). The packed weight replaces the plain one: memory doesn't double. A row's result never
depends on the rows beside it. Without kernels layers stay as they are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from stemma.native.library import Kernels, MultiplyArgs, PackArgs, Strips

# Without our kernels oneDNN multiplies. It prepares a product anew for each number of rows, and it and torch
# each remember the last 1,024 of them, at 0.4 MB apiece: a server that had seen 384 sizes of batches held
# 1.1 GB. Both read these at the first product.
_NUM_PREPARED = 64
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, str(_NUM_PREPARED))
PREPARED_BYTES = _NUM_PREPARED * 420_000
"""What oneDNN's prepared products come to take once a server has seen many sizes of batches."""

_ALIGNMENT = 64


def can_pack(weight: torch.Tensor) -> bool:
    """Whether our products take this weight, [out_features, in_features]: on CPU, float32 or bfloat16.

    In bfloat16 inputs go in pairs, so their number must be even.
    """
    if weight.device.type != "cpu" or weight.dim() != 2 or 0 in weight.shape:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0)


class PackedProduct:
    """x [T, in_features] -> x W^T + b, [T, out_features], over a packed copy of W."""

    def __init__(
        self, kernels: Kernels, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None
    ) -> None:
        """Pack `weights` below each other: [n_i, in_features] each. `bias`: [sum of n_i], of their dtype."""
        assert all(can_pack(weight) for weight in weights)
        self.out_features = sum(weight.shape[0] for weight in weights)
        self.in_features = weights[0].shape[1]
        self.dtype = weights[0].dtype
        self.bias = None if bias is None else bias.detach().to(self.dtype).contiguous()
        self._kernels = kernels
        self._is_bf16 = self.dtype == torch.bfloat16
        self.strips = Strips(None, None, self.out_features, self.in_features)
        """Where the kernels find the weight; valid as long as this object."""
        num_bytes = kernels.packed_bytes(ctypes.addressof(self.strips), self._is_bf16)
        self._room = torch.zeros(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        self.strips.data = -(-self._room.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self.strips.bias = None if self.bias is None else self.bias.data_ptr()
        first = 0
        for weight in weights:
            self._pack(weight.detach(), first)
            first += weight.shape[0]

    def _pack(self, weight: torch.Tensor, first: int) -> None:
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        rows, threads = weight.shape[0], torch.get_num_threads()
        args = PackArgs(weight.data_ptr(), weight.stride(0), rows, first, self.strips, self._is_bf16, threads)
        self._kernels.pack(ctypes.addressof(args))

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


class PackedLinear(nn.Module):
    """Drop-in for `nn.Linear`; made from plain tensors, which the caller then lets go."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.product = PackedProduct(kernels, [weight], bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]; no rows are fine."""
        rows = x.reshape(-1, self.in_features)
        return self.product(rows).view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, unpacked anew: for the few models that ask a layer for its dtype or shape."""
        return self.product.take_rows(torch.arange(self.out_features))


def pack_linears(
    model: nn.Module, kernels: Kernels, keep: frozenset[nn.Module], report: Callable[[float], None]
) -> int:
    """Replace the linear layers of `model` by packed ones; return how many.

    Those in `keep`, those that `can_pack` refuses, and those whose weight something else shares (an output
    head tied to the embedding: its packed copy would come on top), stay plain. `report` gets the share done,
    0..1.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child not in keep
        and uses[id(child.weight)] == 1
        and can_pack(child.weight)
    ]
    for number, (parent, name, linear) in enumerate(found):
        report(number / len(found))
        setattr(parent, name, PackedLinear(kernels, linear.weight, linear.bias))
    leave_file(model)
    return len(found)


def leave_file(model: nn.Module) -> None:
    """Copy what stayed plain, so that the mapped checkpoint file is let go and its pages leave memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def plain_layers(model: nn.Module) -> frozenset[nn.Module]:
    """Return linear layers that are used as tensors, not called: the expansion of a cached latent."""
    modules: Iterable[Any] = model.modules()
    return frozenset(module.kv_b_proj for module in modules if hasattr(module, "stemma_latent"))
