"""One decoder layer's weights, joined into as few products as it computes with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from stemma.model.cpu.experts import PackedExperts
from stemma.model.cpu.latent import PackedLatent
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.recurrent_layer import FusedRecurrent
from stemma.model.cpu.weights import PackedProduct
from stemma.model.families import layout
from stemma.model.weights.named import NamedWeights
from stemma.native.structures import GatedWeights, LatentWeights, LayerWeights, Router, Strips


@dataclass(slots=True)
class FusedGated:
    """down(silu(gate x) * up x): no dense layer is clamped."""

    gate: PackedProduct
    up: PackedProduct
    down: PackedProduct
    is_gelu: bool = False

    def weights(self) -> GatedWeights:
        """Describe the layer to the kernels."""
        return GatedWeights(
            gate=self.gate.strips, up=self.up.strips, down=self.down.strips, is_gelu=self.is_gelu
        )


@dataclass(slots=True)
class Routing:
    """How a token's experts are chosen."""

    product: PackedProduct
    """The product of hidden states to the experts' logits."""
    router: layout.ExpertRouter
    correction: torch.Tensor | None
    """[E] float32."""

    def weights(self) -> Router:
        """Describe the router to the kernels."""
        router = self.router
        return Router(
            weight=self.product.strips,
            correction=None if self.correction is None else self.correction.data_ptr(),
            num_experts=router.linear.outputs,
            top_k=router.top_k,
            by=router.by,
            normalize=router.normalize,
            num_groups=router.num_groups,
            top_groups=router.top_groups,
            scale=router.scale,
        )


@dataclass(slots=True)
class FusedMixture:
    """Experts behind a router."""

    routing: Routing
    experts: PackedExperts
    shared: FusedGated | None
    """Experts that all tokens share, as one gated layer."""
    shared_gate: torch.Tensor | None = None
    """[H] float32."""


class FusedLatent:
    """Weights that a layer with latent attention has beside its products of hidden states."""

    def __init__(
        self, latent: layout.Latent, heads: layout.LatentHeads, weights: NamedWeights, packing: Packing
    ) -> None:
        """Take the norms and expansions of a layer."""
        projection = weights.tensor(f"{latent.projection.name}.weight")
        self._folded = PackedLatent(
            projection,
            nope_dim=heads.nope_dim,
            rope_dim=heads.rope_dim,
            value_dim=heads.value_dim,
            kernels=packing.kernels,
        )
        self._latent = latent
        self._expand = None if latent.expand is None else packing.linears(weights.affine(latent.expand))
        """Of the query's own latent to its heads; None: the query has none."""
        self._query_norm = None if latent.query_norm is None else weights.norm(latent.query_norm)
        self._latent_norm = weights.norm(latent.norm)
        fold, project = self._folded.absorbing, self._folded.projecting
        self._fold = (Strips * len(fold))(*(product.strips for product in fold))
        self._project = (Strips * len(project))(*(product.strips for product in project))

    def weights(self) -> LatentWeights:
        """Describe them to the kernels; valid as long as this object."""
        query_norm = self._latent.query_norm
        return LatentWeights(
            fold=ctypes.addressof(self._fold),
            project=ctypes.addressof(self._project),
            expand=Strips() if self._expand is None else self._expand.strips,
            query_norm=None if self._query_norm is None else self._query_norm.data_ptr(),
            latent_norm=self._latent_norm.data_ptr(),
            query_eps=0.0 if query_norm is None else query_norm.eps,
            latent_eps=self._latent.norm.eps,
        )


@dataclass(slots=True)
class FusedLayer:
    """One layer's weights."""

    qkv: PackedProduct
    """Query, key and value; with latents: the query or its latent, then the token's latent and rotary key."""
    output: PackedProduct
    mlp: FusedGated | FusedMixture
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    head_norms: tuple[torch.Tensor, ...] = field(default=())
    """Weights of the norms of queries and of keys."""
    out_norms: tuple[torch.Tensor, ...] = field(default=())
    """[H] float32: of the norms of what attention and what the MLP gives."""
    latent: FusedLatent | None = None
    recurrent: FusedRecurrent | None = None
    sinks: torch.Tensor | None = None
    """[num_heads] float32."""

    def weights(self, layer: layout.Layer, offsets: tuple[int, int]) -> LayerWeights:
        """Describe the layer to the kernels; valid as long as this object.

        `layer` says how it attends, `offsets` where a recurrent layer's parts of a state begin. A step sets
        where its KV lies.
        """
        mlp = self.mlp
        described = LayerWeights(
            gates=layer.has_gates,
            qkv=self.qkv.strips,
            output=self.output.strips,
            input_norm=self.input_norm.data_ptr(),
            post_norm=self.post_norm.data_ptr(),
            window=layer.window or 0,
            unrotated=not layer.rotates,
            is_local=layer.is_local,
            scale=layer.scaling,
        )
        if self.sinks is not None:
            described.sinks = self.sinks.data_ptr()
        if self.latent is not None:
            described.latent = self.latent.weights()
        if self.recurrent is not None:
            described.recurrent = self.recurrent.weights(*offsets)
        if self.head_norms:
            described.q_norm, described.k_norm = (norm.data_ptr() for norm in self.head_norms)
        if self.out_norms:
            described.attended_norm, described.mlp_norm = (norm.data_ptr() for norm in self.out_norms)
        if isinstance(mlp, FusedGated):
            described.dense = mlp.weights()
            return described
        if mlp.shared is not None:
            described.dense = mlp.shared.weights()
        if mlp.shared_gate is not None:
            described.shared_gate = mlp.shared_gate.data_ptr()
        described.router = mlp.routing.weights()
        described.experts = ctypes.addressof(mlp.experts.weights)
        return described


def fuse(
    layer: layout.Layer,
    heads: layout.GroupedHeads | layout.LatentHeads,
    weights: NamedWeights,
    packing: Packing,
) -> FusedLayer:
    """Pack one layer."""
    latent = None
    if layer.latent is not None:
        assert isinstance(heads, layout.LatentHeads)
        latent = FusedLatent(layer.latent, heads, weights, packing)
    return FusedLayer(
        qkv=packing.linears(*(weights.affine(linear) for linear in layer.inputs), order=layer.order),
        output=packing.linears(weights.affine(layer.output)),
        mlp=_mlp(layer.mlp, weights, packing),
        input_norm=weights.norm(layer.input_norm),
        post_norm=weights.norm(layer.post_norm),
        head_norms=tuple(weights.norm(norm) for norm in layer.head_norms or ()),
        out_norms=tuple(weights.norm(norm) for norm in layer.out_norms or ()),
        latent=latent,
        recurrent=None if layer.recurrent is None else FusedRecurrent(layer.recurrent, weights),
        sinks=None if layer.sinks is None else weights.floats(layer.sinks.name),
    )


def _mlp(
    mlp: layout.Gated | layout.Mixture, weights: NamedWeights, packing: Packing
) -> FusedGated | FusedMixture:
    if isinstance(mlp, layout.Gated):
        return _gated(mlp, weights, packing)
    return _mixture(mlp, weights, packing)


def _gated(gated: layout.Gated, weights: NamedWeights, packing: Packing) -> FusedGated:
    gate, up = packing.side_by_side(weights.affine(gated.gate), weights.affine(gated.up))
    return FusedGated(gate, up, packing.linears(weights.affine(gated.down)), gated.is_gelu)


def _mixture(mixture: layout.Mixture, weights: NamedWeights, packing: Packing) -> FusedMixture:
    experts = PackedExperts(
        packing,
        [weights.affine(expert.gate) for expert in mixture.experts],
        [weights.affine(expert.up) for expert in mixture.experts],
        [weights.affine(expert.down) for expert in mixture.experts],
        mixture.experts[0].clamped,
    )
    shared = None if mixture.shared is None else _gated(mixture.shared, weights, packing)
    gate = None
    if mixture.shared_gate is not None:
        gate = weights.floats(f"{mixture.shared_gate.name}.weight").flatten()
    return FusedMixture(_routing(mixture.router, weights, packing), experts, shared, gate)


def _routing(router: layout.ExpertRouter, weights: NamedWeights, packing: Packing) -> Routing:
    weight, bias = weights.tensor(router.linear.weight), None
    if router.by != layout.RoutedBy.ROUNDED_SOFTMAX:
        weight = weight.float()
    if router.linear.has_bias:
        bias = weights.tensor(f"{router.linear.name}.bias").to(weight.dtype)
    correction = None if router.correction is None else weights.floats(router.correction)
    return Routing(packing.plain(weight, bias), router, correction)
