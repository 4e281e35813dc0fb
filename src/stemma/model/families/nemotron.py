"""Nemotron-H: layers of Mamba 2, attention or feed-forward alone; transformers' modules run."""

from __future__ import annotations

from typing import Any

from stemma.model.families.cuts import Cuts, Mamba2Sizes, mamba2_cuts
from stemma.model.families.family import Family


def _cuts(config: Any, num_ranks: int) -> Cuts:
    heads = config.mamba_num_heads, config.mamba_head_dim
    return mamba2_cuts(Mamba2Sizes("mixer", *heads, config.n_groups, config.ssm_state_size), num_ranks)


NEMOTRON_H = Family("nemotron_h", "NemotronHForCausalLM", cuts=_cuts)
