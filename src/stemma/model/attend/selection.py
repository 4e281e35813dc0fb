"""Sparse attention: each query sees the tokens that an indexer scores highest.

(DeepSeek-V3.2, arXiv:2512.02556.) An indexer has keys of its own, one a token and layer, and queries with few
heads. A token's score is the sum over these heads of ``weight * relu(query . key)``, in float32. Of equal
scores the lower position goes first, so a choice depends on nothing but the query and the keys before it.
Chosen tokens are attended to by rising position: a query that has no more tokens before it than it may choose
gets the bits of plain attention.

The indexer's key lies behind the latent and its rotary key in the token's row of KV: [latent ; rotary ;
index].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The new tokens' half of their scores."""

    query: torch.Tensor
    """[T, heads, dim] float32."""
    weights: torch.Tensor
    """[T, heads] float32."""


@dataclass(frozen=True, slots=True)
class Selection:
    """How the queries of a layer choose."""

    top_k: int
    """Tokens that a query sees at most, itself included if it is among them."""
    dim: int
    """Numbers of an index key."""
    scoring: TokenScores | None
    """None: the layer takes what the layer before chose."""

    def chooses(self, context_lens: Sequence[int]) -> bool:
        """Whether a query of these sequences has more tokens before it than it may see."""
        return max(context_lens) > self.top_k


def choose(selection: Selection, queries: slice, rows: torch.Tensor) -> torch.Tensor:
    """Return whether the last queries of a sequence see its tokens, [n, C] bool.

    `queries` are their rows in the step, `rows` [C, dim of a row] the sequence's KV. With torch alone: the
    reference of the kernel (native/selection.h).
    """
    assert selection.scoring is not None
    query, weights = selection.scoring.query[queries], selection.scoring.weights[queries]
    keys = rows[:, -selection.dim :].float()
    scores = torch.einsum("nh,nhc->nc", weights, torch.relu(query @ keys.T))
    num_queries, num_keys = scores.shape
    positions = torch.arange(num_keys, device=rows.device)
    is_later = positions > positions[num_keys - num_queries :, None]
    scores = scores.masked_fill(is_later, float("-inf"))
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : selection.top_k]
    return torch.zeros_like(is_later).scatter(1, order, True) & ~is_later
