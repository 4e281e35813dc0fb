"""Phi-3 and Phi-4, as GGUF files have them; transformers' modules run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stemma.errors import ModelError
from stemma.model.families.gguf import LAYER_NAMES, Fields, GGUFForm, dense, rope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def _phi3(fields: Fields) -> PreTrainedConfig:
    from transformers import Phi3Config

    return Phi3Config(
        architectures=["Phi3ForCausalLM"],
        original_max_position_embeddings=_trained(fields),
        sliding_window=fields.get("attention.sliding_window") or None,
        **dense(fields, is_joined=True, attention=("blk.0.attn_qkv",), is_partial=True, angles=_angles),
    )


def _trained(fields: Fields) -> int:
    return fields.whole("rope.scaling.original_context_length", fields.whole("context_length"))


def _angles(fields: Fields) -> dict[str, Any]:
    """Return parameters of LongRoPE, whose factors the file has as tensors, or of plain rotation."""
    if _LONG not in fields.header.tensors:
        return rope(fields)
    if _SHORT not in fields.header.tensors:
        raise ModelError(f"{fields.header.path} has {_LONG} without {_SHORT}; download it again")
    fields.get("rope.scaling.type")
    context, original = fields.whole("context_length"), _trained(fields)
    return {
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "rope_type": "longrope",
        "short_factor": fields.floats(_SHORT),
        "long_factor": fields.floats(_LONG),
        "factor": context / original,
        "attention_factor": fields.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": original,
    }


_NAMES = {name: LAYER_NAMES[name] for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")}
PHI3_FORM = GGUFForm(
    "phi3",
    _phi3,
    _NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    read_by_config=frozenset({_LONG, _SHORT}),
)
