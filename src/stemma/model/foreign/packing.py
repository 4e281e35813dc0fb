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
    pack_experts(model, weights, packing)
    pack_latents(model, packing.kernels)
    pack_grouped(model, packing)
    pack_linears(model, weights, packing, plain_layers(model), report)
