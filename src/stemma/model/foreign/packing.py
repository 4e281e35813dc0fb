"""All weights of modules that run as they are, packed."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from stemma.model.cpu.packing import Packing
from stemma.model.foreign.compression import pack_grouped
from stemma.model.foreign.experts import pack_experts
from stemma.model.foreign.latent import pack_latents
from stemma.model.foreign.linears import pack_linears, plain_layers
from stemma.model.foreign.weights import ModuleWeights


def pack_modules(
    model: nn.Module,
    weights: ModuleWeights,
    packing: Packing,
    report: Callable[[float], None] = lambda _share: None,
) -> None:
    """Pack experts, latents and linear layers of `model`; `report` gets the share done, 0..1."""
    _linear_columns(model)
    pack_experts(model, weights, packing)
    pack_latents(model, packing.kernels)
    pack_grouped(model, packing)
    pack_linears(model, weights, packing, plain_layers(model), report)


def _linear_columns(model: nn.Module) -> None:
    """Put plain linear layers in place of GPT-2's: torch rounds their rows by the number of rows."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                linear = nn.Linear(layer.nx, layer.nf, device="meta")
                linear.weight = nn.Parameter(layer.weight.T.contiguous(), requires_grad=False)
                linear.bias = layer.bias
                setattr(parent, name, linear)
