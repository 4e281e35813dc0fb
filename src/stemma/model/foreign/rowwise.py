"""torch operations whose rows don't depend on each other, for models that run through transformers' modules.

In a few of torch's operations the rounding of an element depends on its place: in products with weights on
the number of rows, in some functions on whether the element lies in a full vector or in the rest behind the
last one, of the tensor or of a thread's share. `RowwiseOperations` replaces them while a model runs. It
replaces what the invariance tests of the served families found; the other operations of these models don't
depend on the place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weights import PackedProduct, can_pack
from stemma.model.foreign.weights import ModuleWeights
from stemma.native.library import Kernels

Operation: TypeAlias = Callable[..., Any]

VECTOR = 64
"""Elements; a multiple of what torch's vectorized loops take at a time."""
GRAIN = 32768
"""Elements from which torch shares elementwise work among threads."""

_ELEMENTWISE: frozenset[Operation] = frozenset(
    {
        *(torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, torch.rsqrt, torch.Tensor.rsqrt),
        *(F.silu, F.gelu, F.softplus, torch.erf, torch.Tensor.erf, torch.log1p),
    }
)
_MATMUL: frozenset[Operation] = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})
_PRODUCTS: frozenset[Operation] = frozenset({torch.mul, torch.Tensor.mul, torch.Tensor.__mul__})
MAX_PACKED = 1 << 22
"""Elements of a weight that isn't a layer's own up to which it is packed too: a router's."""


class RowwiseOperations(TorchFunctionMode):
    """While it is active, results of a row don't depend on the rows beside it. One thread at a time."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._packed: dict[int, tuple[torch.Tensor, PackedProduct]] = {}
        """By the identity of the weight, which is held so that no other one gets it."""

    def __torch_function__(
        self, func: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of each of its functions."""
        options = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **options)
        if func in _MATMUL and isinstance(args[0], nn.Parameter) and args[1].dim() == 3:
            return self._columns(*args)
        if func is F.embedding:
            return self._embedding(*args, **options)
        if func in _ELEMENTWISE and args and not options.get("inplace") and args[0].is_floating_point():
            return in_whole_vectors(func, *args, **options)
        if func in _PRODUCTS and all(isinstance(arg, torch.Tensor) and arg.is_complex() for arg in args):
            return _complex_product(*args)
        return func(*args, **options)

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        kept = id(weight) in self._packed
        if not kept and (not can_pack(weight) or weight.numel() > MAX_PACKED or input.dtype != weight.dtype):
            return F.linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1])
        return self._product(weight, bias)(rows).view(*input.shape[:-1], weight.shape[0])

    def _columns(self, weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Multiply a weight [n, k] by columns [1, k, T]."""
        return self._linear(columns.transpose(1, 2), weight).transpose(1, 2)

    def _product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedProduct:
        if not isinstance(weight, nn.Parameter):  # made anew by every call
            return PackedProduct(self._kernels, [weight], bias)
        kept = self._packed.get(id(weight))
        if kept is None:
            kept = self._packed[id(weight)] = weight, PackedProduct(self._kernels, [weight], bias)
        return kept[1]

    def _embedding(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        kept = self._packed.get(id(weight))
        if kept is None:
            return F.embedding(input, weight, *args, **options)
        return kept[1].take_rows(input.reshape(-1)).view(*input.shape, -1)

    def pack_tied_head(self, model: nn.Module, weights: ModuleWeights, packing: Packing) -> None:
        """Pack an output head that is tied to the embedding, whose rows are then read out of it."""
        modules: Any = list(model.modules())
        embeddings = {id(module.weight): module for module in modules if isinstance(module, nn.Embedding)}
        for module in modules:
            if type(module) is nn.Linear and id(module.weight) in embeddings and can_pack(module.weight):
                weight = module.weight
                self._packed[id(weight)] = weight, packing.head(weights.head(module, embeddings[id(weight)]))
                weight.data = weight.new_zeros(1, 1).expand(weight.shape)  # only its shape is asked for


def in_whole_vectors(func: Operation, x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Return an elementwise function of x, padded to whole vectors for every thread.

    No element lies in a rest then.
    """
    count = x.numel()
    padded = _padded(count, torch.get_num_threads())
    if padded == count and x.is_contiguous():
        result: torch.Tensor = func(x, *rest, **options)
        return result
    filled = x.new_zeros(padded)
    filled[:count] = x.reshape(-1)
    whole: torch.Tensor = func(filled, *rest, **options)
    return whole[:count].view(x.shape)


def _complex_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply in real numbers, each product and sum rounded once: torch's loops fuse some of them."""
    real = x.real * y.real - x.imag * y.imag
    return torch.complex(real, x.real * y.imag + x.imag * y.real)


def _padded(count: int, num_threads: int) -> int:
    """Return the least size from `count` on of which each thread's share is made of whole vectors."""
    size = count
    while True:
        shares = max(1, min(num_threads, -(-size // GRAIN)))
        size = -(-size // (VECTOR * shares)) * VECTOR * shares
        if max(1, min(num_threads, -(-size // GRAIN))) == shares:
            return size
