"""Gemma 1, 2 and 3; GGUF files of all three are read. Of 1 and 2 the modules run.

Gemma 3 norms what attention and the network give before it is added, keeps norms' weights less 1, and turns
the heads of layers with windows by angles of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stemma.errors import UnsupportedModel
from stemma.model.families.family import Family
from stemma.model.families.gguf import FOUR_NORMS, LAYER_NAMES, Fields, GGUFForm, dense
from stemma.model.families.gguf_changes import Change, less_one
from stemma.model.families.layout import GroupedHeads, Layer, Linear, ModelLayout, Norm, bounded_layers
from stemma.model.families.pattern import (
    ATTENTION,
    MAX_HEAD_DIM,
    gated,
    head_dim_of,
    layer_path,
    windows_by_type,
)
from stemma.model.families.rotary import RotaryAngles
from stemma.model.files.gguf_keys import shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_TYPES = frozenset({"default", "linear"})
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""llama.cpp tells the 27B models, whose queries are scaled otherwise, by their number of layers."""


def _layout3(config: Any, num_tensors: int) -> ModelLayout | None:
    if config.num_hidden_layers > num_tensors or not _is_native(config):
        return None
    layers = bounded_layers(partial(_layer3, config), config.num_hidden_layers, num_tensors)
    if layers is None:
        return None
    dim, vocabulary, hidden = head_dim_of(config), config.vocab_size, config.hidden_size
    return ModelLayout(
        layers=layers,
        heads=GroupedHeads(config.num_attention_heads, config.num_key_value_heads, dim),
        embedding=Linear("model.embed_tokens", vocabulary, hidden),
        norm=_norm(config, "model.norm", hidden),
        head=None if config.tie_word_embeddings else Linear("lm_head", vocabulary, hidden),
        angles=partial(RotaryAngles, config, dim, _FULL),
        local_angles=partial(RotaryAngles, config, dim, _SLIDING),
        embedding_scale=float(hidden**0.5),
        rounds_embedding_scale=True,
    )


def _is_native(config: Any) -> bool:
    if config.hidden_activation != "gelu_pytorch_tanh" or config.final_logit_softcapping is not None:
        return False
    if config.use_bidirectional_attention:  # refused by those that run its modules
        return False
    kinds = config.layer_types
    if len(kinds) != config.num_hidden_layers or not set(kinds) <= {_FULL, _SLIDING}:
        return False
    if not config.query_pre_attn_scalar > 0 or (config.sliding_window or 0) < 1:
        return False
    ropes = (config.rope_parameters.get(kind) for kind in (_FULL, _SLIDING))
    if any(rope is None or rope.get("rope_type") not in _ROPE_TYPES for rope in ropes):
        return False
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, head_dim_of(config)
    if kv_heads <= 0 or heads % kv_heads:
        return False
    is_even = not any(size % 2 for size in (config.hidden_size, config.intermediate_size, dim))
    return is_even and 0 < dim <= MAX_HEAD_DIM


def _norm(config: Any, name: str, size: int) -> Norm:
    return Norm(name, size, float(config.rms_norm_eps), is_centered=True)


def _layer3(config: Any, number: int) -> Layer:
    path, hidden, dim = layer_path(number), config.hidden_size, head_dim_of(config)
    query, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes = ((query, hidden), (kv, hidden), (kv, hidden), (hidden, query))
    attention = [
        Linear(f"{path}.self_attn.{name}", *shape, config.attention_bias)
        for name, shape in zip(ATTENTION, shapes, strict=True)
    ]
    norm = partial(_norm, config)
    return Layer(
        inputs=tuple(attention[:3]),
        output=attention[3],
        mlp=replace(gated(f"{path}.mlp", hidden, config.intermediate_size), is_gelu=True),
        input_norm=norm(f"{path}.input_layernorm", hidden),
        post_norm=norm(f"{path}.pre_feedforward_layernorm", hidden),
        scaling=float(config.query_pre_attn_scalar**-0.5),
        head_norms=(norm(f"{path}.self_attn.q_norm", dim), norm(f"{path}.self_attn.k_norm", dim)),
        window=windows_by_type(config)[number],
        is_local=config.layer_types[number] == _SLIDING,
        out_norms=(
            norm(f"{path}.post_attention_layernorm", hidden),
            norm(f"{path}.post_feedforward_layernorm", hidden),
        ),
    )


def _gemma(fields: Fields) -> PreTrainedConfig:
    from transformers import GemmaConfig

    return GemmaConfig(architectures=["GemmaForCausalLM"], hidden_act="gelu_pytorch_tanh", **dense(fields))


def _gemma2(fields: Fields) -> PreTrainedConfig:
    from transformers import Gemma2Config

    config = dense(fields)
    return Gemma2Config(
        architectures=["Gemma2ForCausalLM"],
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=fields.whole("attention.sliding_window", 4096),
        layer_types=_layer_types(config["num_hidden_layers"], 2),
        attn_logit_softcapping=fields.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=fields.number("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=_query_scalar(config, _GEMMA2_27B_LAYERS),
        **config,
    )


def _gemma3(fields: Fields) -> PreTrainedConfig:
    from transformers import Gemma3TextConfig

    config = dense(fields)
    local = fields.number("rope.freq_base_swa", 10_000.0)
    pattern = fields.get("attention.sliding_window_pattern")
    layer_types = _layer_types(config["num_hidden_layers"], 6)
    if pattern not in (None, 6, [kind == "sliding_attention" for kind in layer_types]):
        raise UnsupportedModel(
            f"{fields.header.path}: attention.sliding_window_pattern is {shown(pattern)}; read is 6, "
            "Gemma 3's own"
        )
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=fields.whole("attention.sliding_window"),
        layer_types=layer_types,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        query_pre_attn_scalar=_query_scalar(config, _GEMMA3_27B_LAYERS),
        **config,
    )


def _layer_types(num_layers: int, period: int) -> list[str]:
    """Every layer slides but the last of each `period`."""
    return [
        "full_attention" if layer % period == period - 1 else "sliding_attention"
        for layer in range(num_layers)
    ]


def _query_scalar(config: dict[str, Any], layers_of_27b: int) -> int:
    """Return the number whose square root divides Gemma's scores, as llama.cpp chooses it."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _change(name: str, _config: Any) -> Change | None:
    return Change(numbers=less_one) if name.endswith("norm.weight") else None


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM")
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", own_layout=_layout3, cuts=None)
GEMMA_FORMS = (
    GGUFForm("gemma", _gemma, LAYER_NAMES, change=_change),
    GGUFForm("gemma2", _gemma2, LAYER_NAMES | FOUR_NORMS, change=_change),
    GGUFForm("gemma3", _gemma3, LAYER_NAMES | FOUR_NORMS, change=_change),
)
