"""OLMo Hybrid, Kimi-Linear and MiniMax-01: linear attention by heads in most layers; their modules run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stemma.model.families.cuts import CutRun, Cuts, LinearHeads, lightning_cuts, linear_head_cuts
from stemma.model.families.family import Family
from stemma.model.families.pattern import head_dim_of


def _olmo(config: Any, _num_ranks: int) -> Cuts:
    """Return the cuts; the norms of queries and keys go over all heads, and so over all ranks."""
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    keys, values = key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    each, dim = (CutRun(heads),), head_dim_of(config)
    cuts = linear_head_cuts(
        LinearHeads("linear_attn", heads, key_heads, keys, values),
        {
            **{"linear_attn.a_proj": each, "linear_attn.A_log": each, "linear_attn.dt_bias": each},
            "linear_attn.g_proj": (CutRun(values),),
            "self_attn.q_norm": (CutRun(config.num_attention_heads * dim),),
            "self_attn.k_norm": (CutRun(config.num_key_value_heads * dim),),
        },
    )
    return replace(cuts, norms=frozenset({"self_attn.q_norm", "self_attn.k_norm"}))


def _kimi(config: Any, _num_ranks: int) -> Cuts:
    heads, dim = config.linear_num_heads, config.linear_head_dim
    inner = CutRun(heads * dim)
    cuts = linear_head_cuts(
        LinearHeads("self_attn", heads, heads, inner.length, inner.length),
        {"f_b_proj": (inner,), "g_b_proj": (inner,), "dt_bias": (inner,), "A_log": (CutRun(heads),)},
    )
    return replace(cuts, axes={"A_log": 2})


LINEAR = (
    Family("olmo_hybrid", "OlmoHybridForCausalLM", cuts=_olmo),
    Family("kimi_linear", "KimiLinearForCausalLM", cuts=_kimi),
    Family("minimax", "MiniMaxForCausalLM", cuts=lightning_cuts),
)
