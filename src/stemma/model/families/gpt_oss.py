"""GPT-OSS, as GGUF files have it; transformers' modules run.

The file has gates and ups apart and experts as [outputs, inputs], most often in MXFP4; transformers has gates
and ups by turns, as [inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from stemma.model.families.gguf import LAYER_NAMES, Fields, GGUFForm, base, experts
from stemma.model.families.gguf_changes import Change, Join, interleaved, transposed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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


def _change(name: str, _config: Any) -> Change | None:
    return Change(layout=transposed, dimensions=3) if name == "mlp.experts.down_proj" else None


def _gates_and_ups(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join gates and ups [experts, rows, inputs] as [experts, inputs, 2 rows], by turns."""
    return interleaved([transposed(part) for part in parts])


_NAMES = {name: made for name, made in LAYER_NAMES.items() if name.startswith("attn")} | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    **{
        f"ffn_{part}_exps.{kind}": f"mlp.experts.{part}.{kind}"
        for part in ("gate", "up")
        for kind in ("weight", "bias")
    },
}
_PARTS = "mlp.experts.gate", "mlp.experts.up"
GPT_OSS_FORM = GGUFForm(
    "gpt-oss",
    _gpt_oss,
    _NAMES,
    experts={},
    change=_change,
    joins={
        "mlp.experts.gate_up_proj": Join(
            tuple(f"{part}.weight" for part in _PARTS), plain=_gates_and_ups, dimensions=3
        ),
        "mlp.experts.gate_up_proj_bias": Join(tuple(f"{part}.bias" for part in _PARTS), plain=interleaved),
    },
)
