"""Qwen3-Next and Qwen3.5, as GGUF files have them.

The file has a recurrent layer's inputs by kind; Qwen3-Next's are joined head by head in transformers. In
Qwen3.5's files the value heads of a key head lie apart: all first ones, then all second ones.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from stemma.errors import ModelError
from stemma.model.families.gguf import (
    EXPERTS,
    LAYER_NAMES,
    Fields,
    GGUFForm,
    base,
    count_layers,
    experts,
)
from stemma.model.families.gguf_changes import Change, Join, less_one, to_logarithm, with_channel
from stemma.model.families.qwen_next import rows_by_kind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MIXER = "linear_attn."


def _shapes(fields: Fields) -> dict[str, Any]:
    """Return what attention and recurrent layers are made of."""
    num_layers = count_layers(fields, guesses=True)
    interval = fields.whole("full_attention_interval", 4)
    attends = [(number + 1) % interval == 0 for number in range(num_layers)]
    fields.get("rope.dimension_sections")  # all alike for text
    first = interval - 1
    attention = (f"blk.{first}.attn_q", f"blk.{first}.attn_k") if any(attends) else ()
    return {
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        **base(fields, num_layers=num_layers, attention=attention, has_gates=True, is_partial=True),
        **(_linear(fields, attends.index(False)) if not all(attends) else {}),
    }


def _linear(fields: Fields, layer: int) -> dict[str, int]:
    heads, key_heads = fields.whole("ssm.time_step_rank"), fields.whole("ssm.group_count")
    key_dim, inner = fields.whole("ssm.state_size"), fields.whole("ssm.inner_size")
    width = fields.whole("ssm.conv_kernel")
    if inner % heads or heads % key_heads:
        raise ModelError(
            f"{fields.header.path}: ssm.inner_size {inner}, ssm.time_step_rank {heads} and ssm.group_count "
            f"{key_heads} must divide each other in this order; download it again"
        )
    made = (2 * key_heads * key_dim + inner, width)
    stored = fields.shape(f"blk.{layer}.ssm_conv1d.weight")
    if made != stored:
        raise ModelError(
            f"{fields.header.path}: ssm_conv1d is {list(stored)}, the metadata make {list(made)}"
        )
    return {
        "linear_num_value_heads": heads,
        "linear_num_key_heads": key_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": width,
    }


def _mixture(fields: Fields) -> dict[str, Any]:
    num_experts, num_used, width = experts(fields)
    shared = fields.shape("blk.0.ffn_up_shexp.weight")[0]
    if shared != fields.whole("expert_shared_feed_forward_length", shared):
        raise ModelError(f"{fields.header.path}: expert_shared_feed_forward_length isn't that of its tensors")
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": num_used,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "intermediate_size": fields.whole("feed_forward_length", width),
    }


def _next(fields: Fields) -> PreTrainedConfig:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"], norm_topk_prob=True, **_shapes(fields), **_mixture(fields)
    )


def _three_five(fields: Fields) -> PreTrainedConfig:
    from transformers import Qwen3_5TextConfig

    width = fields.whole("feed_forward_length")
    return Qwen3_5TextConfig(architectures=["Qwen3_5ForCausalLM"], intermediate_size=width, **_shapes(fields))


def _three_five_moe(fields: Fields) -> PreTrainedConfig:
    from transformers import Qwen3_5MoeTextConfig

    mixture = _mixture(fields)
    mixture.pop("intermediate_size")
    return Qwen3_5MoeTextConfig(architectures=["Qwen3_5MoeForCausalLM"], **_shapes(fields), **mixture)


def _change(name: str, config: Any) -> Change | None:
    if name == f"{_MIXER}A_log":
        return Change(numbers=to_logarithm)
    if name == f"{_MIXER}conv1d.weight":
        return Change(layout=with_channel, dimensions=2)
    if name == "mlp.shared_expert_gate.weight":
        return Change(layout=_one_row)
    if name.endswith("norm.weight") and name != f"{_MIXER}norm.weight":
        return Change(numbers=less_one)
    return None


def _one_row(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(1, -1)


def _change_tiled(name: str, config: Any) -> Change | None:
    """As `_change`, and value heads that share a key head back together."""
    changed = _change(name, config) or Change()
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if not name.startswith(_MIXER) or keys == values:
        return changed

    def grouped(dim: int) -> list[int]:
        each = values // keys
        heads = (copy * keys + key for key in range(keys) for copy in range(each))
        return [head * dim + at for head, at in product(heads, range(dim))]

    dim, part = config.linear_value_head_dim, name.removeprefix(_MIXER).removesuffix(".weight")
    if part in ("in_proj_qkv", "conv1d"):
        others = 2 * keys * config.linear_key_head_dim
        rows = [*range(others), *(others + row for row in grouped(dim))]
        return Change(rows=rows, layout=changed.layout, dimensions=2)
    if part in ("A_log", "dt_bias", "in_proj_a", "in_proj_b"):
        return Change(rows=grouped(1), numbers=changed.numbers)
    if part == "in_proj_z":
        return Change(rows=grouped(dim))
    return Change(columns=grouped(dim), dimensions=2) if part == "out_proj" else changed


def _joined_rows(config: Any) -> list[int]:
    """Return where the file has the rows of ``in_proj_qkvz``, which lie head by head."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    by_kind = rows_by_kind(keys, values // keys, config.linear_key_head_dim, config.linear_value_head_dim)
    order: list[int] = torch.tensor(by_kind).argsort().tolist()
    return order


_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": f"{_MIXER}in_proj_qkv",
    "attn_gate": f"{_MIXER}in_proj_z",
    "ssm_conv1d": f"{_MIXER}conv1d",
    "ssm_a": f"{_MIXER}A_log",
    "ssm_dt.bias": f"{_MIXER}dt_bias",
    "ssm_norm": f"{_MIXER}norm",
    "ssm_out": f"{_MIXER}out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_APART = {"ssm_beta": f"{_MIXER}in_proj_b", "ssm_alpha": f"{_MIXER}in_proj_a"}
_TOGETHER = {"ssm_in": f"{_MIXER}in_proj_qkvz", "ssm_ba": f"{_MIXER}in_proj_ba"}
"""`ssm_in`: older files have the joined inputs as they are."""
QWEN_NEXT_FORMS = (
    GGUFForm(
        "qwen3next",
        _next,
        _NAMES | _TOGETHER,
        change=_change,
        experts=EXPERTS,
        joins={
            f"{_MIXER}in_proj_qkvz.weight": Join(
                (f"{_MIXER}in_proj_qkv.weight", f"{_MIXER}in_proj_z.weight"), rows=_joined_rows
            )
        },
    ),
    GGUFForm("qwen35", _three_five, _NAMES | _APART, change=_change_tiled),
    GGUFForm("qwen35moe", _three_five_moe, _NAMES | _APART, change=_change_tiled),
)
