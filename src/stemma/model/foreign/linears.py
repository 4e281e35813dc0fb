"""Linear layers of a model of transformers, replaced by products over packed weights (cpu/weights.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weights import PackedProduct, can_pack
from stemma.model.foreign.weights import ModuleWeights

_CHOOSING = frozenset({"gate", "router", "weights_proj"})
"""Names of the layers that choose experts, and weigh the heads that choose tokens: small, never rounded."""


class PackedLinear(nn.Module):
    """Drop-in for `nn.Linear`."""

    def __init__(self, product: PackedProduct) -> None:
        super().__init__()
        self.out_features, self.in_features = product.out_features, product.in_features
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]; no rows are fine."""
        rows = x.reshape(-1, self.in_features)
        return self.product(rows).view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, unpacked anew: for the few models that ask a layer for its dtype or shape."""
        return self.product.take_rows(torch.arange(self.out_features))


def pack_linears(
    model: nn.Module,
    weights: ModuleWeights,
    packing: Packing,
    keep: frozenset[nn.Module],
    report: Callable[[float], None],
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
    output_of = getattr(model, "get_output_embeddings", None)  # what a whole model of transformers has
    head = output_of() if callable(output_of) else None
    for number, (parent, name, linear) in enumerate(found):
        report(number / len(found))
        if name in _CHOOSING:
            product = packing.plain(linear.weight.detach(), linear.bias)
        else:
            pack = packing.head if linear is head else packing.linears
            product = pack(weights.linear(linear))
        setattr(parent, name, PackedLinear(product))
    leave_file(model)
    return len(found)


def leave_file(model: nn.Module) -> None:
    """Copy the weights that stay plain: the checkpoint file is unmapped and its pages leave memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def plain_layers(model: nn.Module) -> frozenset[nn.Module]:
    """Return linear layers that are used as tensors, not called.

    They are the expansion of a cached latent, and of a Mamba layer's time step.
    """
    modules: Iterable[Any] = list(model.modules())
    latent = [module.kv_b_proj for module in modules if hasattr(module, "stemma_latent")]
    return frozenset(
        [*latent, *(m.dt_proj for m in modules if hasattr(m, "dt_proj") and hasattr(m, "x_proj"))]
    )
