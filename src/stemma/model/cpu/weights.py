"""Linear layers with weights prepacked by oneDNN: the lever of decode on CPU.

Decode reads every weight once a token, so it runs at the speed of reading memory, if the kernel lets it.
`F.linear` in bf16 is far from that; oneDNN with a weight in its own blocked order is nearer, for any number
of rows, and native/strips.h, which reads the same packed weights, is there. torch has the packing inside (its
compiler uses it) as private operators, which are called nowhere but here. `can_pack` tries them out and
compares with `F.linear`; where they are missing or differ, layers stay as they are. The packed weight
replaces the plain one: memory doesn't double.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

# oneDNN prepares a product anew for each number of rows, and it and torch each remember the last 1,024 of
# them, at 0.4 MB apiece: a server that had seen 384 sizes of batches held 1.1 GB. Both read these at the
# first product.
_NUM_PREPARED = 64
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, str(_NUM_PREPARED))
PREPARED_BYTES = _NUM_PREPARED * 420_000
"""What oneDNN's prepared products come to take once a server has seen many sizes of batches."""

LinearFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""x [..., in_features] -> [..., out_features]."""


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def _packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return output


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine multiplies with prepacked weights of `dtype`, and rightly."""
    backend: Any = torch.backends.mkldnn
    if device.type != "cpu" or dtype != torch.bfloat16 or not backend.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((48, 64), (3, 64), (48,))
    )
    try:
        with torch.inference_mode():
            output = _packed_linear(x, _pack(weight), bias)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(output.float(), F.linear(x, weight, bias).float(), atol=0.1, rtol=0.02)


class PackedProduct:
    """x [T, in_features] -> x W^T + b, [T, out_features], over a packed copy of W."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = _pack(weight.detach())
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self.strips: int | None = _address_of_strips(weight.detach(), self._packed)
        """Where the packed weight lies if its order is that of native/strips.h, else None."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; no rows are fine."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.out_features)
        output: torch.Tensor = self._multiply(x, self._packed, self.bias, "none", [], "")
        return output


def linear_function(weight: torch.Tensor, bias: torch.Tensor | None, *, pack: bool) -> LinearFunction:
    """Return x -> x W^T + b for 2-D x; with `pack`, over a packed copy (let `weight` go, then)."""
    if not pack:
        return partial(F.linear, weight=weight.detach(), bias=bias)
    return PackedProduct(weight, bias)


def _address_of_strips(weight: torch.Tensor, packed: torch.Tensor) -> int | None:
    """Return the address of a packed bf16 weight if it is ordered as native/strips.h reads it, else None.

    oneDNN doesn't say which order it chose, so its size and a thousand elements from all parts are compared.
    """
    rows, columns = weight.shape
    num_strips = -(-rows // 64)
    size = num_strips * 64 * -(-columns // 32) * 32
    try:
        address = int(torch.ops.mkldnn.data_ptr(packed))
        found_bytes = int(torch.ops.mkldnn._nbytes(packed))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    if weight.dtype != torch.bfloat16 or columns % 2 or found_bytes != 2 * size:
        return None
    elements = torch.frombuffer((ctypes.c_char * found_bytes).from_address(address), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(rows, (1000,), generator=generator)
    column = torch.randint(columns, (1000,), generator=generator)
    strips = elements.view(num_strips, -1, 64, 2)  # a strip's pairs of inputs, each for 64 outputs
    found = strips[row // 64, column // 2, row % 64, column % 2]
    return address if torch.equal(found.view(torch.int16), weight[row, column].view(torch.int16)) else None


class PackedLinear(nn.Module):
    """Drop-in for `nn.Linear`; made from plain tensors, which the caller then lets go."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = _pack(weight.detach())
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]; no rows are fine."""
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return _packed_linear(x, self._packed, self.bias)

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, unpacked anew: for the few models that ask a layer for its dtype or shape."""
        return self._packed.to_dense()


def pack_linears(model: nn.Module, keep: frozenset[nn.Module], report: Callable[[float], None]) -> int:
    """Replace the linear layers of `model` by packed ones; return how many.

    Those in `keep`, and those whose weight something else shares (an output head tied to the embedding: its
    packed copy would come on top), stay plain. `report` gets the share done, 0..1.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child not in keep and uses[id(child.weight)] == 1
    ]
    for number, (parent, name, linear) in enumerate(found):
        report(number / len(found))
        setattr(parent, name, PackedLinear(linear.weight, linear.bias))
    leave_file(model)
    return len(found)


def leave_file(model: nn.Module) -> None:
    """Copy what stayed plain, so that the mapped checkpoint file is let go and its pages leave memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def plain_layers(model: nn.Module) -> frozenset[nn.Module]:
    """Return linear layers that are used as tensors, not called: the expansion of a cached latent."""
    modules: Any = model.modules()
    return frozenset(module.kv_b_proj for module in modules if hasattr(module, "stemma_latent"))
