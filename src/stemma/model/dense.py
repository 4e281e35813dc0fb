"""Dense models of known families, made of a checkpoint's tensors without transformers' modules.

Importing transformers' modules and letting them load takes longer than reading and packing the weights of a
small model, and the fused decoder takes only weights and a few numbers from them. So a checkpoint of a family
below that has exactly the tensors that its config makes, without sliding windows, is read into holders of
weights with the names that transformers gives. Anything else goes through transformers, which also has the
words for what is wrong with it.

The numbers of rotary embeddings are computed as transformers' modules of these families do; tests compare
logits of both ways bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stemma.errors import ModelError
from stemma.model.attention import AttentionCall
from stemma.model.causal_lm import KVShape
from stemma.model.cpu.fused import MAX_HEAD_DIM, PackedWeights
from stemma.model.families.family import ATTENTION, GATED
from stemma.model.families.registry import dense_of, family_of

_CONFIG_MODULES = ("transformers.models.", "stemma.model.llama_config")
"""Where configs come from that mean what they say; imported by whoever has one."""
_SCALED = frozenset({"linear", "llama3", "yarn"})
"""Rotary embeddings whose angles transformers computes once; others may change with the length."""


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


class Rotary:
    """Cosines and sines of positions, in transformers' order: both halves of a head have the same angles."""

    def __init__(self, config: Any) -> None:
        parameters = config.rope_parameters
        self._scaling = 1.0
        if parameters["rope_type"] == "default":
            dim = head_dim_of(config)
            self._frequencies = 1.0 / (
                parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
            )
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            self._frequencies, self._scaling = compute(config, torch.device("cpu"))
        if 2 * len(self._frequencies) != head_dim_of(config):
            raise ModelError(
                f"the rotary embedding has {len(self._frequencies)} angles for heads of "
                f"{head_dim_of(config)} dims; two dims share one. See rope_parameters in config.json"
            )

    def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of `positions` [1, T] as [1, T, head_dim] each, in the dtype of `like`."""
        half = positions[..., None].float() * self._frequencies
        angles = torch.cat((half, half), dim=-1)
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return cos.to(like.dtype), sin.to(like.dtype)


class DenseWeights(nn.Module):
    """All weights of a dense model, under transformers' names."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        *,
        num_layers: int,
        head_dim: int,
        eps: float,
        norms_heads: bool,
        is_tied: bool,
    ) -> None:
        """Take tensors; those of another dtype are converted. Raises KeyError if one is missing."""
        super().__init__()

        def layer_of(name: str) -> Weights:
            bias = tensors.get(f"{name}.bias")
            return Weights(tensors[f"{name}.weight"].to(dtype), None if bias is None else bias.to(dtype))

        def norm(name: str) -> Norm:
            return Norm(tensors[f"{name}.weight"].to(dtype), eps)

        base: Any = nn.Module()
        base.embed_tokens = layer_of("model.embed_tokens")
        base.layers = nn.ModuleList()
        for number in range(num_layers):
            prefix = f"model.layers.{number}"
            layer: Any = nn.Module()
            layer.self_attn = attention = nn.Module()
            layer.mlp = mlp = nn.Module()
            for part in ATTENTION:
                setattr(attention, part, layer_of(f"{prefix}.self_attn.{part}"))
            attention.head_dim = head_dim  # type: ignore[assignment]
            if norms_heads:
                attention.q_norm, attention.k_norm = (
                    norm(f"{prefix}.self_attn.{name}") for name in ("q_norm", "k_norm")
                )
            for part in GATED:
                setattr(mlp, part, layer_of(f"{prefix}.mlp.{part}"))
            layer.input_layernorm = norm(f"{prefix}.input_layernorm")
            layer.post_attention_layernorm = norm(f"{prefix}.post_attention_layernorm")
            base.layers.append(layer)
        base.norm = norm("model.norm")
        self.model = base
        if is_tied:
            self.lm_head = Weights(base.embed_tokens.weight)
            self.lm_head.weight = base.embed_tokens.weight
        else:
            self.lm_head = layer_of("lm_head")


class DenseModel(DenseWeights):
    """A dense model's weights, and what the fused decoder asks of a model beside them."""

    packed: PackedWeights | None = None
    """The same weights, where they were checked and packed before; then these here are never read."""

    def __init__(self, config: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """Take tensors that `fits` said yes to; those of another dtype are converted."""
        family = family_of(config.model_type)
        assert family is not None
        assert family.dense is not None
        super().__init__(
            tensors,
            dtype,
            num_layers=config.num_hidden_layers,
            head_dim=head_dim_of(config),
            eps=float(config.rms_norm_eps),
            norms_heads=family.dense.norms_heads,
            is_tied=config.tie_word_embeddings,
        )
        self.config, self.dtype, self._dense = config, dtype, family.dense
        self.architecture = family.architecture
        self.model.config, self.model.rotary_emb = config, Rotary(config)

    def attention(self) -> tuple[KVShape, list[AttentionCall]]:
        """Return the shape of the KV that the layers keep, and how each wants its attention computed."""
        head_dim, num_layers = head_dim_of(self.config), int(self.config.num_hidden_layers)
        calls = [
            AttentionCall(
                number, head_dim**-0.5, sliding_window=None, softcap=None, latent=None, rotates=rotates
            )
            for number, rotates in enumerate(self._dense.rotating(self.config))
        ]
        return KVShape(num_layers, 2, int(self.config.num_key_value_heads), head_dim), calls


def head_dim_of(config: Any) -> int:
    """Return the dims of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def fits(config: Any, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether `DenseModel` holds a model of this config, in `dtype`, with tensors of these shapes by name."""
    # A damaged config may count more layers than there is time for.
    return config.num_hidden_layers <= len(shapes) and _expected(config, dtype) == shapes


def _expected(config: Any, dtype: torch.dtype) -> dict[str, tuple[int, ...]] | None:
    """Return the shape of each tensor that the config makes; None: `DenseModel` holds no such models."""
    is_known = type(config).__module__.startswith(_CONFIG_MODULES)
    family = dense_of(config.model_type)
    if family is None or not is_known:
        return None
    if dtype not in (torch.bfloat16, torch.float32) or config.hidden_act != "silu" or family.slides(config):
        return None
    if len(family.rotating(config)) != config.num_hidden_layers:
        return None
    rope = config.rope_parameters
    if not isinstance(rope, dict) or rope.get("rope_type") not in {"default", *_SCALED}:
        return None
    # The native step reads an angle for every dim of a head: fewer would be read beyond their end.
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        return None
    hidden, width, head_dim = config.hidden_size, config.intermediate_size, head_dim_of(config)
    query, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    if kv <= 0 or query % kv:
        return None
    # Products in bfloat16 take inputs in pairs.
    if not 0 < head_dim <= MAX_HEAD_DIM or any(size % 2 for size in (hidden, width, head_dim)):
        return None
    linears = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if family.norms_heads:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    biased = family.biased(config)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if name.split(".")[1] in biased:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    return shapes if all(size > 0 for shape in shapes.values() for size in shape) else None
