"""One decoder layer's weights, joined into as few products as it computes with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stemma.model.attention import AttentionCall
from stemma.model.cpu.weights import LinearFunction, linear_function


@dataclass(slots=True)
class FusedLayer:
    """One layer's weights, ready to be called."""

    qkv: LinearFunction
    output: LinearFunction
    gate_up: LinearFunction | None
    """None: `mlp` is called instead."""
    down: LinearFunction | None
    mlp: Callable[[torch.Tensor], Any] | None
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sliding_window: int
    """0: none."""
    scaling: float


def _join(linears: list[Any], pack: bool) -> LinearFunction:
    """Return one product that computes those of several layers, side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
    return linear_function(weight, bias, pack=pack)


def fuse(layer: Any, call: AttentionCall, pack: bool) -> FusedLayer:
    """Take a layer of transformers apart; `call` is what it passed to attention in the probe."""
    attention, mlp = layer.self_attn, layer.mlp
    dense = all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return FusedLayer(
        qkv=_join([attention.q_proj, attention.k_proj, attention.v_proj], pack),
        output=_join([attention.o_proj], pack),
        gate_up=_join([mlp.gate_proj, mlp.up_proj], pack) if dense else None,
        down=_join([mlp.down_proj], pack) if dense else None,
        mlp=None if dense else mlp,
        input_norm=layer.input_layernorm.weight.detach().clone(),
        post_norm=layer.post_attention_layernorm.weight.detach().clone(),
        q_norm=None if q_norm is None else q_norm.weight.detach().clone(),
        k_norm=None if k_norm is None else k_norm.weight.detach().clone(),
        sliding_window=call.sliding_window or 0,
        scaling=call.scaling,
    )
