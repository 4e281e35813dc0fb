"""GLM-4 (0414) and GLM-Z1, as GGUF files have them; transformers' modules run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stemma.errors import UnsupportedModel
from stemma.model.families.gguf import LAYER_NAMES, Fields, GGUFForm, dense

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _glm4(fields: Fields) -> PreTrainedConfig:
    from transformers import Glm4Config

    if fields.get("rope.dimension_sections"):
        raise UnsupportedModel(
            f"{fields.header.path} is the text part of a GLM-4 with images, which isn't read from GGUF; give "
            "the directory of the original checkpoint"
        )
    has_bias = "blk.0.attn_q.bias" in fields.header.tensors
    config = dense(fields, is_joined=True, is_partial=True)
    return Glm4Config(architectures=["Glm4ForCausalLM"], attention_bias=has_bias, **config)


_NAMES = {name: made for name, made in LAYER_NAMES.items() if name != "ffn_gate"} | {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
GLM4_FORM = GGUFForm("glm4", _glm4, _NAMES)
