"""One decoder layer's weights, joined into as few products as it computes with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from stemma.model.attention import AttentionCall
from stemma.model.cpu.experts import PackedExperts
from stemma.model.cpu.latent import PackedLatent
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weights import PackedProduct
from stemma.model.families.layout import RoutedBy
from stemma.native.structures import GatedWeights, LatentWeights, LayerWeights, Router, Strips


@dataclass(slots=True)
class Gated:
    """down(silu(gate x) * up x)."""

    gate: PackedProduct
    up: PackedProduct
    down: PackedProduct

    def weights(self) -> GatedWeights:
        """Describe the layer to the kernels."""
        return GatedWeights(self.gate.strips, self.up.strips, self.down.strips)


@dataclass(slots=True)
class Routing:
    """How a token's experts are chosen: see `Router` of mixture.h."""

    product: PackedProduct
    """Of hidden states to the experts' logits."""
    by: RoutedBy
    top_k: int
    normalize: bool
    """Divide the weights of a token's experts by their sum."""
    scale: float = 1.0
    correction: torch.Tensor | None = None
    """[E] float32, added to scores for the choice alone."""
    num_groups: int = 0
    """0: experts are in no groups."""
    top_groups: int = 0

    def weights(self, num_experts: int) -> Router:
        """Describe the router to the kernels."""
        return Router(
            weight=self.product.strips,
            correction=None if self.correction is None else self.correction.data_ptr(),
            num_experts=num_experts,
            top_k=self.top_k,
            by=self.by,
            normalize=self.normalize,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            scale=self.scale,
        )


@dataclass(slots=True)
class Mixture:
    """Experts behind a router."""

    routing: Routing
    experts: PackedExperts
    shared: Gated | None = None
    """Experts that all tokens share, as one gated layer."""


class FusedLatent:
    """What a layer with latent attention has beside its products of hidden states."""

    def __init__(self, attention: Any, packing: Packing) -> None:
        """Take the norms and expansions of an attention module whose latents are cached."""
        self._folded = PackedLatent(attention.stemma_latent, packing.kernels)
        self.expand: PackedProduct | None = None
        """Of the query's own latent to its heads; None: the query has none."""
        self._query_norm: torch.Tensor | None = None
        self._query_eps = 0.0
        if attention.q_lora_rank is not None:
            self.expand = packing.linears(attention.q_b_proj)
            self._query_norm = attention.q_a_layernorm.weight.detach().clone()
            self._query_eps = float(attention.q_a_layernorm.variance_epsilon)
        self._latent_norm = attention.kv_a_layernorm.weight.detach().clone()
        self._latent_eps = float(attention.kv_a_layernorm.variance_epsilon)
        fold, project = self._folded.absorbing, self._folded.projecting
        self._fold = (Strips * len(fold))(*(product.strips for product in fold))
        self._project = (Strips * len(project))(*(product.strips for product in project))

    def weights(self) -> LatentWeights:
        """Describe them to the kernels; valid as long as this object."""
        return LatentWeights(
            fold=ctypes.addressof(self._fold),
            project=ctypes.addressof(self._project),
            expand=Strips() if self.expand is None else self.expand.strips,
            query_norm=None if self._query_norm is None else self._query_norm.data_ptr(),
            latent_norm=self._latent_norm.data_ptr(),
            query_eps=self._query_eps,
            latent_eps=self._latent_eps,
        )


@dataclass(slots=True)
class FusedLayer:
    """One layer's weights."""

    qkv: PackedProduct
    """Query, key and value; with latents: the query or its latent, then the token's latent and rotary key."""
    joined: dict[str, int]
    """Names of the linear layers in `qkv` -> their outputs, in order."""
    output: PackedProduct
    mlp: Gated | Mixture
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    latent: FusedLatent | None
    sliding_window: int = 0
    """0: none."""
    scaling: float = 1.0
    rotates: bool = True

    def attend_by(self, call: AttentionCall) -> None:
        """Set what the layer passed to attention in the probe."""
        self.sliding_window, self.scaling = call.sliding_window or 0, call.scaling
        self.rotates = call.rotates

    def weights(self) -> LayerWeights:
        """Describe the layer to the kernels; valid as long as this object."""
        mlp = self.mlp
        described = LayerWeights(
            qkv=self.qkv.strips,
            output=self.output.strips,
            window=self.sliding_window,
            unrotated=not self.rotates,
            scale=self.scaling,
        )
        if self.latent is not None:
            described.latent = self.latent.weights()
        norms = (self.input_norm, self.post_norm, self.q_norm, self.k_norm)
        for name, norm in zip(("input_norm", "post_norm", "q_norm", "k_norm"), norms, strict=True):
            setattr(described, name, None if norm is None else norm.data_ptr())
        if isinstance(mlp, Gated):
            described.dense = mlp.weights()
            return described
        if mlp.shared is not None:
            described.dense = mlp.shared.weights()
        described.router = mlp.routing.weights(mlp.experts.num_experts)
        described.experts = ctypes.addressof(mlp.experts.weights)
        return described


def fuse(layer: Any, packing: Packing) -> FusedLayer:
    """Take a layer of transformers apart; how it attends is set later."""
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    joined = joined_linears(attention)
    return FusedLayer(
        qkv=packing.linears(*joined.values()),
        joined={name: int(linear.out_features) for name, linear in joined.items()},
        output=packing.linears(attention.o_proj),
        mlp=_mixture(packing, mlp) if hasattr(mlp, "experts") else _gated(packing, mlp),
        input_norm=layer.input_layernorm.weight.detach().clone(),
        post_norm=layer.post_attention_layernorm.weight.detach().clone(),
        q_norm=None if q_norm is None else q_norm.weight.detach().clone(),
        k_norm=None if k_norm is None else k_norm.weight.detach().clone(),
        latent=FusedLatent(attention, packing) if hasattr(attention, "stemma_latent") else None,
    )


def joined_linears(attention: Any) -> dict[str, Any]:
    """Return the linear layers that read a layer's normed hidden states, by name."""
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    if hasattr(attention, "stemma_latent"):
        names = ("q_proj" if attention.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa")
    return {name: getattr(attention, name) for name in names}


def _gated(packing: Packing, mlp: Any) -> Gated:
    gate, up = packing.side_by_side(mlp.gate_proj, mlp.up_proj)
    return Gated(gate, up, packing.linears(mlp.down_proj))


def _mixture(packing: Packing, mlp: Any) -> Mixture:
    experts, shared = PackedExperts(packing, mlp.experts), getattr(mlp, "shared_experts", None)
    return Mixture(_routing(packing, mlp.gate), experts, None if shared is None else _gated(packing, shared))


def _routing(packing: Packing, gate: Any) -> Routing:
    """Describe the router of Qwen3-MoE, DeepSeek-V2 or DeepSeek-V3: `can_route` says whether it is one."""
    weight = gate.weight.detach()
    if not hasattr(gate, "routed_scaling_factor"):
        return Routing(packing.plain(weight), RoutedBy.ROUNDED_SOFTMAX, gate.top_k, bool(gate.norm_topk_prob))
    product, scale = packing.plain(weight.float()), float(gate.routed_scaling_factor)
    correction = getattr(gate, "e_score_correction_bias", None)
    if correction is None:
        groups = (gate.num_group, gate.topk_group) if gate.topk_method == "group_limited_greedy" else (0, 0)
        return Routing(product, RoutedBy.SOFTMAX, gate.top_k, False, scale, None, *groups)
    return Routing(
        product,
        RoutedBy.SIGMOID,
        gate.top_k,
        bool(gate.norm_topk_prob),
        scale,
        correction.detach().float().contiguous(),
        gate.num_group,
        gate.topk_group,
    )


def can_route(gate: Any) -> bool:
    """Whether a router is one that the kernels know."""
    if getattr(gate, "weight", None) is None or getattr(gate, "bias", None) is not None:
        return False
    if not hasattr(gate, "routed_scaling_factor"):
        return hasattr(gate, "top_k") and hasattr(gate, "norm_topk_prob")
    experts = gate.weight.shape[0]
    if hasattr(gate, "e_score_correction_bias"):
        has_known_groups = True
    elif getattr(gate, "topk_method", None) == "greedy":
        return True
    else:
        has_known_groups = getattr(gate, "topk_method", None) == "group_limited_greedy"
    return bool(has_known_groups and gate.num_group and 0 < gate.topk_group <= gate.num_group) and (
        experts % gate.num_group == 0
    )
