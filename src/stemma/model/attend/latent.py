"""Multi-head latent attention (DeepSeek-V2/V3 and similar): the compressed latent is cached.

A token is projected to one latent vector and one shared rotary key. What is cached is [latent ; rotary key],
a single key head. There are two ways to attend:

- absorbed (DeepSeek-V2, arXiv:2405.04434, 2.1.2): fold the key expansion into the query and the value
  expansion into the output; attention is then multi-query attention over latents, and the context is never
  expanded. Right for decode.
- expanded: multiply the latents out once; cheaper where many queries share a context. Right for prefill.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class LatentProjection:
    """A layer's `kv_b_proj`: what turns its latents into keys and values of all heads."""

    def __init__(self, weight: torch.Tensor, *, nope_dim: int, rope_dim: int, value_dim: int) -> None:
        """Take `kv_b_proj.weight`, [H * (nope + value), rank].

        A second copy of both halves is kept in the order that makes small products four to eight times
        faster on CPU; it takes less than one percent of such a model's weights.
        """
        self.weight = weight.view(-1, nope_dim + value_dim, weight.shape[1])
        self._key_weight = self.weight[:, :nope_dim].transpose(1, 2).contiguous().transpose(1, 2)
        self._value_weight = self.weight[:, nope_dim:].transpose(1, 2).contiguous()
        self.rank = weight.shape[1]
        self.nope_dim = nope_dim
        self.rope_dim = rope_dim
        self.value_dim = value_dim
        # Expanding a context costs rank * (nope + value) a token and head, once; absorbing costs each query
        # the longer dot products. Equal at this number of queries.
        extra = 2 * self.rank - nope_dim - value_dim
        self.max_absorbed_queries = self.rank * (nope_dim + value_dim) // extra if extra > 0 else 1 << 30

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Turn q [T, H, nope + rope] into a query over latents, [T, H, rank + rope]."""
        nope = query[..., : self.nope_dim]
        folded = torch.bmm(nope.transpose(0, 1), self._key_weight).transpose(0, 1)
        return torch.cat((folded, query[..., self.nope_dim :]), dim=-1)

    def project(self, output: torch.Tensor) -> torch.Tensor:
        """Turn weighted latents [T, H, rank] into the heads' values [T, H, value]."""
        return torch.bmm(output.transpose(0, 1), self._value_weight).transpose(0, 1)

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn cached latents [C, rank + rope] into keys [C, H, nope + rope] and values [C, H, value]."""
        num_heads = self.weight.shape[0]
        both = F.linear(latent[:, : self.rank], self.weight.flatten(0, 1))
        both = both.view(latent.shape[0], num_heads, self.nope_dim + self.value_dim)
        rope = latent[:, None, self.rank :].expand(-1, num_heads, -1)
        return torch.cat((both[..., : self.nope_dim], rope), dim=-1), both[..., self.nope_dim :]
