"""An adapter in host memory: for each linear layer it touches, two narrow matrices and a factor.

LoRA (Hu et al., arXiv:2106.09685) adds ``scale * up (down x)`` to a layer's output. The names of the layers
are those of the modules of transformers, e.g. ``model.layers.0.self_attn.q_proj``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer that adapters may add to."""

    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """The two matrices that an adapter adds to one linear layer."""

    down: torch.Tensor
    """[rank, in_features], as stored: float32, float16 or bfloat16; on CPU."""
    up: torch.Tensor
    """[out_features, rank], likewise."""
    scale: float

    def ready(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both matrices for products in `dtype`: with zeros added where the rank is odd."""
        down, up = self.down.to(dtype), self.up.to(dtype)
        if down.shape[0] % 2 == 0:
            return down, up
        return F.pad(down, (0, 0, 0, 1)), F.pad(up, (0, 1))


@dataclass(frozen=True, eq=False)
class Adapter:
    """Immutable; requests that use it hold it, so it outlives its name."""

    key: str
    """Hexadecimal SHA-256 of its matrices and factors; part of the root of block keys."""
    rank: int
    """The largest."""
    pairs: Mapping[str, LowRankPair]
    """By the name of the layer."""
    num_bytes: int
    """Bytes of all matrices."""
    name: str = ""
    """The name that requests call it by; one adapter under two names shares matrices and key."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which rows of a batch an adapter serves; rows of one adapter lie together."""

    prepared: object
    """The object that `CausalLM.prepare_adapter` returned."""
    rows: tuple[int, int]
    """Half-open range of the batch's rows."""
    logits: tuple[int, int]
    """Half-open range of those of `ForwardBatch.logits_rows` among them."""
