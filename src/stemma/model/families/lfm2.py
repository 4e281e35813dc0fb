"""LFM2, dense and mixtures, and as GGUF files have it; transformers' modules run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stemma.model.families.cuts import short_convolution_cuts
from stemma.model.families.family import Family
from stemma.model.families.gguf import TOP_NAMES, Fields, GGUFForm, base, count_layers
from stemma.model.families.gguf_changes import Change, with_channel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _lfm2(fields: Fields) -> PreTrainedConfig:
    from transformers import Lfm2Config

    num_layers = count_layers(fields)
    kv_heads = fields.by_layer("attention.head_count_kv", num_layers)
    attends = [layer for layer, count in enumerate(kv_heads) if count]
    attention = tuple(f"blk.{layer}.attn_{name}" for layer in attends[:1] for name in "qk")
    most = max(kv_heads) or fields.whole("attention.head_count")
    config = base(fields, num_layers=num_layers, kv_heads=most, attention=attention)
    has_bias = any(name.endswith("shortconv.in_proj.bias") for name in fields.header.tensors)
    return Lfm2Config(
        architectures=["Lfm2ForCausalLM"],
        norm_eps=config.pop("rms_norm_eps"),
        intermediate_size=fields.whole("feed_forward_length"),
        block_auto_adjust_ff_dim=False,  # the file has it adjusted
        conv_L_cache=fields.whole("shortconv.l_cache"),
        conv_bias=has_bias,
        layer_types=["full_attention" if count else "conv" for count in kv_heads],
        **config,
    )


def _change(name: str, _config: Any) -> Change | None:
    return Change(layout=with_channel, dimensions=2) if name == "conv.conv.weight" else None


LFM2 = (
    Family("lfm2", "Lfm2ForCausalLM", cuts=short_convolution_cuts),
    Family("lfm2_moe", "Lfm2MoeForCausalLM", cuts=short_convolution_cuts),
)
LFM2_FORM = GGUFForm(
    "lfm2",
    _lfm2,
    {
        "attn_norm": "operator_norm",
        **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
        **{f"attn_{name}_norm": f"self_attn.{name}_layernorm" for name in "qk"},
        "attn_output": "self_attn.out_proj",
        **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
        "ffn_norm": "ffn_norm",
        **{"ffn_gate": "feed_forward.w1", "ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3"},
    },
    # The norm behind the last layer has had both names.
    top_names=TOP_NAMES | dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm"),
    change=_change,
)
