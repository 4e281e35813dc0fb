"""One decoder layer's weights, joined into as few products as it computes with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from stemma.model.attention import AttentionCall
from stemma.model.cpu.experts import PackedExperts
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weights import PackedProduct
from stemma.native.library import GatedWeights, LayerWeights


@dataclass(slots=True)
class Gated:
    """down(silu(gate x) * up x)."""

    gate: PackedProduct
    up: PackedProduct
    down: PackedProduct


@dataclass(slots=True)
class Mixture:
    """Experts behind a softmax router."""

    router: PackedProduct
    experts: PackedExperts
    top_k: int
    normalize: bool
    """Divide the weights of a token's experts by their sum."""


@dataclass(slots=True)
class FusedLayer:
    """One layer's weights."""

    qkv: PackedProduct
    output: PackedProduct
    mlp: Gated | Mixture
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sliding_window: int
    """0: none."""
    scaling: float

    def weights(self) -> LayerWeights:
        """Describe the layer to the kernels; valid as long as this object."""
        mlp = self.mlp
        norms = (self.input_norm, self.post_norm, self.q_norm, self.k_norm)
        described = LayerWeights(
            qkv=self.qkv.strips,
            output=self.output.strips,
            input_norm=self.input_norm.data_ptr(),
            post_norm=self.post_norm.data_ptr(),
            window=self.sliding_window,
            scale=self.scaling,
        )
        for name, norm in zip(("input_norm", "post_norm", "q_norm", "k_norm"), norms, strict=True):
            setattr(described, name, None if norm is None else norm.data_ptr())
        if isinstance(mlp, Gated):
            described.dense = GatedWeights(mlp.gate.strips, mlp.up.strips, mlp.down.strips)
        else:
            described.router = mlp.router.strips
            described.experts = ctypes.addressof(mlp.experts.weights)
            described.num_experts, described.top_k = mlp.experts.num_experts, mlp.top_k
            described.normalize = mlp.normalize
        return described


def fuse(layer: Any, call: AttentionCall, packing: Packing) -> FusedLayer:
    """Take a layer of transformers apart; `call` is what it passed to attention in the probe."""
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return FusedLayer(
        qkv=packing.linears(attention.q_proj, attention.k_proj, attention.v_proj),
        output=packing.linears(attention.o_proj),
        mlp=_mixture(packing, mlp) if hasattr(mlp, "experts") else _gated(packing, mlp),
        input_norm=layer.input_layernorm.weight.detach().clone(),
        post_norm=layer.post_attention_layernorm.weight.detach().clone(),
        q_norm=None if q_norm is None else q_norm.weight.detach().clone(),
        k_norm=None if k_norm is None else k_norm.weight.detach().clone(),
        sliding_window=call.sliding_window or 0,
        scaling=call.scaling,
    )


def _gated(packing: Packing, mlp: Any) -> Gated:
    gate, up = packing.side_by_side(mlp.gate_proj, mlp.up_proj)
    return Gated(gate, up, packing.linears(mlp.down_proj))


def _mixture(packing: Packing, mlp: Any) -> Mixture:
    experts = PackedExperts(packing, mlp.experts)
    return Mixture(
        router=packing.plain(mlp.gate.weight),
        experts=experts,
        top_k=mlp.gate.top_k,
        normalize=bool(mlp.gate.norm_topk_prob),
    )
