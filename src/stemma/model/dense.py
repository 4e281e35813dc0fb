"""Dense models of known families, made of a checkpoint's tensors without transformers' modules.

Importing transformers' modules and letting them load takes longer than reading and packing the weights of a
small model, and the fused decoder takes only weights and a few numbers from them. So a checkpoint of the
Llama pattern that has exactly the tensors of its layout (families/) is read into holders of weights with the
names that transformers gives. Anything else goes through transformers, which also has the words for what is
wrong with it. Tests compare logits of both ways bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stemma.model.attention import AttentionCall
from stemma.model.causal_lm import KVShape
from stemma.model.cpu.fused import PackedWeights
from stemma.model.families.layout import Gated, GroupedHeads, Linear, ModelLayout
from stemma.model.families.layout import Norm as RMSNorm
from stemma.model.families.registry import family_of


class Weights(nn.Module):
    """A layer's weight and bias, without its function."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take `weight` [out_features, in_features], or [dim] of a norm."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = weight.shape[0], weight.shape[-1]


class Norm(Weights):
    """An RMS norm's weight."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__(weight)
        self.variance_epsilon = eps


class DenseWeights(nn.Module):
    """All weights of a dense model, under transformers' names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, layout: ModelLayout) -> None:
        """Take tensors; those of another dtype are converted. Raises KeyError if one is missing."""
        super().__init__()

        def linear(part: Linear) -> Weights:
            bias = tensors[f"{part.name}.bias"].to(dtype) if part.has_bias else None
            return Weights(tensors[f"{part.name}.weight"].to(dtype), bias)

        def norm(part: RMSNorm) -> Norm:
            return Norm(tensors[f"{part.name}.weight"].to(dtype), part.eps)

        base: Any = nn.Module()
        base.embed_tokens = linear(layout.embedding)
        base.layers = nn.ModuleList()
        for described in layout.layers:
            layer: Any = nn.Module()
            layer.self_attn, layer.mlp = nn.Module(), nn.Module()
            assert isinstance(described.mlp, Gated)
            for part in (*described.inputs, described.output):
                setattr(layer.self_attn, _last(part.name), linear(part))
            for part in (described.mlp.gate, described.mlp.up, described.mlp.down):
                setattr(layer.mlp, _last(part.name), linear(part))
            for head_norm in described.head_norms or ():
                setattr(layer.self_attn, _last(head_norm.name), norm(head_norm))
            layer.input_layernorm = norm(described.input_norm)
            layer.post_attention_layernorm = norm(described.post_norm)
            base.layers.append(layer)
        base.norm = norm(layout.norm)
        self.model = base
        if layout.head is None:
            self.lm_head = Weights(base.embed_tokens.weight)
            self.lm_head.weight = base.embed_tokens.weight
        else:
            self.lm_head = linear(layout.head)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


class DenseModel(DenseWeights):
    """A dense model's weights, and what the fused decoder asks of a model beside them."""

    packed: PackedWeights | None = None
    """The same weights, where they were checked and packed before; then these here are never read."""

    def __init__(
        self, config: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, layout: ModelLayout
    ) -> None:
        """Take tensors that fit `layout`, which `is_dense`; those of another dtype are converted."""
        super().__init__(tensors, dtype, layout)
        family = family_of(config.model_type)
        assert family is not None
        self.config, self.dtype, self._layout = config, dtype, layout
        self.architecture = family.architecture
        self.model.config, self.model.rotary_emb = config, layout.angles()
        assert isinstance(layout.heads, GroupedHeads)
        self._heads = layout.heads
        for layer in self.model.layers:
            layer.self_attn.head_dim = layout.heads.head_dim

    def attention(self) -> tuple[KVShape, list[AttentionCall]]:
        """Return the shape of the KV that the layers keep, and how each wants its attention computed."""
        calls = [
            AttentionCall(
                number, layer.scaling, layer.window, softcap=None, latent=None, rotates=layer.rotates
            )
            for number, layer in enumerate(self._layout.layers)
        ]
        return KVShape(len(calls), 2, self._heads.num_kv_heads, self._heads.head_dim), calls


def is_dense(layout: ModelLayout) -> bool:
    """Whether `DenseModel` holds a model of this layout."""
    is_grouped = isinstance(layout.heads, GroupedHeads)
    return is_grouped and all(isinstance(layer.mlp, Gated) for layer in layout.layers)
