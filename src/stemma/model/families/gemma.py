"""Gemma 1, 2 and 3. Their modules run; GGUF files of all three are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stemma.errors import UnsupportedModel
from stemma.model.families.family import Family
from stemma.model.families.gguf import FOUR_NORMS, LAYER_NAMES, Fields, GGUFForm, dense
from stemma.model.families.gguf_changes import Change, less_one
from stemma.model.gguf_keys import shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""llama.cpp tells the 27B models, whose queries are scaled otherwise, by their number of layers."""


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
GEMMA_FORMS = (
    GGUFForm("gemma", _gemma, LAYER_NAMES, change=_change),
    GGUFForm("gemma2", _gemma2, LAYER_NAMES | FOUR_NORMS, change=_change),
    GGUFForm("gemma3", _gemma3, LAYER_NAMES | FOUR_NORMS, change=_change),
)
