"""Latent attention of transformers' modules: they hand the latent to attention instead of keys and values.

Their layers expand a token's latent to keys and values of all heads in `expand_kv`. `cache_latents` replaces
that expansion by a no-op: attention then receives the latent itself, [latent ; rotary key], as a single key
head.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from stemma.model.attend.latent import LatentProjection
from stemma.model.cpu.latent import PackedLatent
from stemma.model.cpu.weights import can_pack
from stemma.native.library import Kernels


def _keep_latent(
    module: nn.Module, kv_nope: torch.Tensor, k_rot: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for `expand_kv`: [1, 1, T, rank] and [1, 1, T, rope] -> the latent, as key and as value."""
    latent = torch.cat((kv_nope, k_rot), dim=-1)
    return latent, kv_nope


def cache_latents(model: nn.Module) -> int:
    """Make every MLA layer of `model` pass latents to attention; return the number of such layers."""
    num_layers = 0
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if not (hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")):
            continue
        module.stemma_latent = LatentProjection(
            module.kv_b_proj.weight.detach(),
            nope_dim=module.qk_nope_head_dim,
            rope_dim=module.qk_rope_head_dim,
            value_dim=module.v_head_dim,
        )
        module.expand_kv = MethodType(_keep_latent, module)
        num_layers += 1
    return num_layers


def pack_latents(model: nn.Module, kernels: Kernels) -> None:
    """Pack the latent projections of all layers and drop the plain weights."""
    modules: Any = list(model.modules())
    for module in modules:
        plain = getattr(module, "stemma_latent", None)
        if plain is None or not can_pack_latent(plain):
            continue
        module.stemma_latent = PackedLatent(
            plain.weight.flatten(0, 1),
            nope_dim=plain.nope_dim,
            rope_dim=plain.rope_dim,
            value_dim=plain.value_dim,
            kernels=kernels,
        )
        module.kv_b_proj = nn.Identity()


def can_pack_latent(plain: LatentProjection) -> bool:
    """Whether both products of a head can be packed."""
    head = plain.weight[0]
    return can_pack(head[: plain.nope_dim].T) and can_pack(head[plain.nope_dim :])
