"""Sparse attention of transformers' modules: DeepSeek-V3.2, and GLM-5 with choices that layers share.

Their layers make the choice a mask over all tokens. `index_latents` replaces their forward by one that hands
attention the indexer's queries, and its key beside the latent.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import torch
from torch import nn

from stemma.errors import UnsupportedModel
from stemma.model.attend.selection import Selection, TokenScores
from stemma.model.foreign.attention import paged_attention

_ROTATIONS = {
    "DeepseekV32Attention": "apply_rotary_pos_emb",
    "GlmMoeDsaAttention": "apply_rotary_pos_emb_interleave",
}
"""Classes of attention that are known here -> the function that rotates their indexer's queries and keys."""


def index_latents(model: nn.Module) -> None:
    """Make every layer with an indexer choose through attention.

    Raises UnsupportedModel for one that takes the choice of a layer before it and has none.
    """
    known: list[Any] = [module for module in model.modules() if type(module).__name__ in _ROTATIONS]
    has_choice = False
    for module in known:
        has_choice = has_choice or module.indexer is not None
        if not has_choice or module.config.index_topk < 1:
            raise UnsupportedModel(
                f"{type(model).__name__}: layer {module.layer_idx} chooses no tokens, and there is no choice "
                "before it to take; compare index_topk and indexer_types of config.json with the one the "
                "checkpoint was published with"
            )
        if module.indexer is not None:
            # Asked of a packed layer, it would be unpacked each time.
            module.indexer.stemma_weights_dtype = module.indexer.weights_proj.weight.dtype
        module.forward = MethodType(_attend, module)


def _attend(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Replace the forward of a layer's attention: hidden states [1, T, H] -> the same, and companions."""
    num_tokens = hidden_states.shape[1]
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb_interleave
    query_latent = module.q_a_layernorm(module.q_a_proj(hidden_states))
    query = module.q_b_proj(query_latent).view(1, num_tokens, -1, module.qk_head_dim).transpose(1, 2)
    query, query_rotary = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    compressed = module.kv_a_proj_with_mqa(hidden_states)
    latent, rotary = compressed.split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
    latent = module.kv_a_layernorm(latent)[:, None]
    query_rotary, rotary = rotate(query_rotary, rotary[:, None], *position_embeddings)
    selection, index_key = _select(module, hidden_states, query_latent, position_embeddings)
    output, _ = paged_attention(
        module,
        torch.cat((query, query_rotary), dim=-1),
        torch.cat((latent, rotary, index_key), dim=-1),
        latent,
        attention_mask,
        scaling=module.scaling,
        selection=selection,
        **kwargs,
    )
    attended = module.o_proj(output.reshape(1, num_tokens, -1).contiguous())
    # GLM's layers return what they chose too.
    return (attended, None, None) if hasattr(module, "skip_topk") else (attended, None)


def _select(
    module: Any,
    hidden_states: torch.Tensor,
    query_latent: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[Selection, torch.Tensor]:
    """Return how a layer's new tokens choose, and their index keys [1, 1, T, dim]."""
    top_k, dim = int(module.config.index_topk), int(module.config.index_head_dim)
    indexer, num_tokens = module.indexer, hidden_states.shape[1]
    if indexer is None:
        return Selection(top_k, dim, None), hidden_states.new_zeros(1, 1, num_tokens, dim)
    rotate = getattr(sys.modules[type(module).__module__], _ROTATIONS[type(module).__name__])
    parts = [indexer.qk_rope_head_dim, dim - indexer.qk_rope_head_dim]
    query = indexer.wq_b(query_latent).view(1, num_tokens, indexer.n_heads, dim)
    key = indexer.k_norm(indexer.wk(hidden_states))[:, :, None]
    (query_rotary, query_rest), (key_rotary, key_rest) = query.split(parts, -1), key.split(parts, -1)
    query_rotary, key_rotary = rotate(query_rotary, key_rotary, *position_embeddings, unsqueeze_dim=2)
    weights = indexer.weights_proj(hidden_states.to(indexer.stemma_weights_dtype)).float()
    scale = indexer.n_heads**-0.5 * indexer.softmax_scale
    scoring = TokenScores(torch.cat((query_rotary, query_rest), dim=-1)[0].float(), weights[0] * scale)
    return Selection(top_k, dim, scoring), torch.cat((key_rotary, key_rest), dim=-1).transpose(1, 2)
