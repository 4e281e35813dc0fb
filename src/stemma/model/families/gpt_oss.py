"""GPT-OSS: mixtures with sinks, every other layer with a window, and gates and ups by turns in one tensor.

Checkpoints of transformers stack all experts of a layer, as [experts, inputs, outputs]. In quantized ones
(GGUF, and MXFP4 as OpenAI publishes it) each expert's gate, up and down are read as weights of their own;
their biases stay stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from stemma.model.families.family import Apart, Family
from stemma.model.families.gguf import LAYER_NAMES, Fields, GGUFForm, base, experts
from stemma.model.families.gguf_changes import Join, interleaved, transposed
from stemma.model.families.layout import (
    Bias,
    Clamped,
    ExpertRouter,
    Gated,
    Linear,
    Mixture,
    ModelLayout,
    Piece,
    RoutedBy,
)
from stemma.model.families.pattern import ATTENTION, LlamaPattern, layer_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MOST_EXPERTS = 1024
"""They are pieces of few tensors, whose number doesn't bound them."""


def _mixture(config: Any, number: int, make: Callable[[Any, str, int], Gated]) -> Mixture:
    count = config.num_local_experts
    path = f"{layer_path(number)}.mlp"
    router = ExpertRouter(
        Linear(f"{path}.router", count, config.hidden_size, has_bias=True),
        RoutedBy.ROUNDED_SOFTMAX,  # of the chosen alone, which is what normalizing gives
        config.num_experts_per_tok,
        normalize=True,
    )
    return Mixture(router, tuple(make(config, f"{path}.experts", expert) for expert in range(count)))


def _stacked_expert(config: Any, path: str, number: int) -> Gated:
    """Return an expert of tensors that hold all of a layer."""
    apart = _expert_apart(config, path, number)
    count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
    joined, down = (count, hidden, 2 * inner), (count, inner, hidden)

    def part(linear: Linear, name: str, shape: tuple[int, ...], first: int, step: int) -> Linear:
        piece = Piece(shape, first, number, is_transposed=True, step=step)
        return replace(linear, name=f"{path}.{name}", ending="", piece=piece)

    return replace(
        apart,
        gate=part(apart.gate, "gate_up_proj", joined, 0, 2),
        up=part(apart.up, "gate_up_proj", joined, 1, 2),
        down=part(apart.down, "down_proj", down, 0, 1),
    )


def _expert_apart(config: Any, path: str, number: int) -> Gated:
    """Return an expert whose weights are tensors of their own, with biases that are stacked."""
    count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size

    def part(name: str, outputs: int, inputs: int, bias: Bias) -> Linear:
        return Linear(f"{path}.{number}.{name}", outputs, inputs, has_bias=True, bias=bias)

    def gated(first: int) -> Bias:
        return Bias(f"{path}.gate_up_proj_bias", Piece((count, 2 * inner), first, number, step=2))

    return Gated(
        part("gate_proj", inner, hidden, gated(0)),
        part("up_proj", inner, hidden, gated(1)),
        part("down_proj", hidden, inner, Bias(f"{path}.down_proj_bias", Piece((count, hidden), 0, number))),
        Clamped(float(config.swiglu_alpha), float(config.swiglu_limit)),
    )


def _stack(gates: torch.Tensor, ups: torch.Tensor, downs: torch.Tensor) -> dict[str, torch.Tensor]:
    joined = interleaved([transposed(gates), transposed(ups)])
    return {"experts.gate_up_proj": joined, "experts.down_proj": transposed(downs)}


def _layout(
    config: Any, num_tensors: int, make: Callable[[Any, str, int], Gated] = _stacked_expert
) -> ModelLayout | None:
    sharpness, limit = float(config.swiglu_alpha), float(config.swiglu_limit)
    if config.num_local_experts > _MOST_EXPERTS or not (0.0 < sharpness < inf and limit > 0.0):
        return None
    pattern = LlamaPattern(
        biased=lambda config: ATTENTION if config.attention_bias else (),
        mlp=partial(_mixture, make=make),
        has_sinks=True,
        rounds_once=True,
    )
    return pattern.layout(config, num_tensors)


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    own_layout=_layout,
    apart=Apart(partial(_layout, make=_expert_apart), _stack),
    cuts=None,
)


def _gpt_oss(fields: Fields) -> PreTrainedConfig:
    from transformers import GptOssConfig

    num_experts, num_used, width = experts(fields)
    fields.get("feed_forward_length")  # of no layer
    config = base(fields)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    return GptOssConfig(
        architectures=["GptOssForCausalLM"],
        num_local_experts=num_experts,
        num_experts_per_tok=num_used,
        intermediate_size=width,
        sliding_window=fields.whole("attention.sliding_window"),
        attention_bias=True,
        **config,
    )


_GATED = "gate", "up"
_NAMES = {name: made for name, made in LAYER_NAMES.items() if name.startswith("attn")} | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    **{f"ffn_{part}_exps.bias": f"mlp.experts.{part}.bias" for part in _GATED},
}
GPT_OSS_FORM = GGUFForm(
    "gpt-oss",
    _gpt_oss,
    _NAMES,
    joins={
        "mlp.experts.gate_up_proj_bias": Join(
            tuple(f"mlp.experts.{part}.bias" for part in _GATED), plain=interleaved
        ),
    },
)
