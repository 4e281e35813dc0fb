"""Mamba, Falcon-Mamba, Mamba 2, Jamba and Falcon-H1: layers of Mamba alone, among or beside attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stemma.errors import UnsupportedModel
from stemma.model.families.cuts import Cuts, Mamba2Sizes, mamba1_cuts, mamba2_cuts
from stemma.model.families.family import Family


def _mamba(config: Any, num_ranks: int) -> Cuts:
    return mamba1_cuts("mixer", config.intermediate_size, num_ranks)


def _jamba(config: Any, num_ranks: int) -> Cuts:
    return mamba1_cuts("mamba", config.mamba_expand * config.hidden_size, num_ranks)


def _mamba2(config: Any, num_ranks: int) -> Cuts:
    sizes = Mamba2Sizes("mixer", config.num_heads, config.head_dim, config.n_groups, config.state_size)
    return mamba2_cuts(sizes, num_ranks)


def _falcon_h1(config: Any, num_ranks: int) -> Cuts:
    """Return the cuts; what multiplies the joined inputs is divided as they are."""
    groups = config.mamba_n_groups
    if config.mamba_rms_norm and config.mamba_norm_before_gate and groups == 1:
        raise UnsupportedModel(
            "FalconH1ForCausalLM with mamba_norm_before_gate and one group isn't cut for several ranks: they "
            "would have to norm before they gate; leave tensor_parallel_size 1"
        )
    heads = config.mamba_n_heads, config.mamba_d_head
    cuts = mamba2_cuts(Mamba2Sizes("mamba", *heads, groups, config.mamba_d_state), num_ranks)
    return replace(
        cuts,
        buffers={"mamba.mup_vector": cuts.columns["mamba.in_proj"]},
        axes={"mamba.mup_vector": 2},
        norms=cuts.norms if config.mamba_rms_norm else frozenset(),
    )


MAMBA = (
    Family("mamba", "MambaForCausalLM", cuts=_mamba),
    Family("falcon_mamba", "FalconMambaForCausalLM", cuts=_mamba),
    Family("mamba2", "Mamba2ForCausalLM", cuts=_mamba2),
    Family("jamba", "JambaForCausalLM", cuts=_jamba),
    Family("falcon_h1", "FalconH1ForCausalLM", cuts=_falcon_h1),
)
