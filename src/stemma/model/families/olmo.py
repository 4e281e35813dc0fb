"""OLMo 2 and 3, as GGUF files have them; transformers' modules run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stemma.errors import UnsupportedModel
from stemma.model.families.gguf import FOUR_NORMS, LAYER_NAMES, Fields, GGUFForm, dense
from stemma.model.files.gguf_keys import shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _olmo2(fields: Fields) -> PreTrainedConfig:
    """OLMo 3 has the same name, and windows."""
    from transformers import Olmo2Config, Olmo3Config

    config = dense(fields)
    window = fields.get("attention.sliding_window")
    slides = fields.get("attention.sliding_window_pattern")
    if not window:
        return Olmo2Config(architectures=["Olmo2ForCausalLM"], **config)
    if not isinstance(slides, list) or len(slides) != config["num_hidden_layers"]:
        raise UnsupportedModel(
            f"{fields.header.path}: attention.sliding_window_pattern is {shown(slides)}; read is one value a "
            "layer. Give the directory of the original checkpoint"
        )
    rope = config.pop("rope_parameters")
    return Olmo3Config(
        architectures=["Olmo3ForCausalLM"],
        sliding_window=fields.whole("attention.sliding_window"),
        layer_types=["sliding_attention" if each else "full_attention" for each in slides],
        rope_parameters={
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        },
        **config,
    )


_BEHIND = {name: FOUR_NORMS[name] for name in ("post_attention_norm", "post_ffw_norm")}
_NAMES = {name: made for name, made in LAYER_NAMES.items() if name not in ("attn_norm", "ffn_norm")}
OLMO2_FORM = GGUFForm("olmo2", _olmo2, _NAMES | _BEHIND)
