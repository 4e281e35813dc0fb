"""How a layer wants its attention computed, and who computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from stemma.model.attend.compression import Compression
from stemma.model.attend.latent import LatentProjection
from stemma.model.attend.selection import Selection

SUPPORTED = (
    "Stemma serves causal language models of transformers that go through its attention interface and keep "
    "per-token KV: Llama, Mistral, Qwen2, Qwen2.5, Qwen3, SmolLM3, Seed-OSS, Qwen3-MoE, Gemma 2, "
    "DeepSeek-V2/V3/R1 and others built alike; and hybrids with the recurrent layers of Qwen3-Next, Qwen3.5, "
    "Kimi-Linear, Granite 4, Mamba and LFM2; the sparse attention of DeepSeek-V3.2 and GLM-5, and the "
    "compressed one of DeepSeek-V4."
)


@dataclass(frozen=True, slots=True)
class Sight:
    """Which of the tokens before it a query sees; itself it always sees."""

    window: int | None = None
    """The last so many, itself included; None: all."""
    chunk: int | None = None
    """Those from the last multiple of this on; None: all."""
    first_key: int = 0
    """Those before this one are seen by no query but their own; 0: all."""

    @property
    def is_whole(self) -> bool:
        """Whether every token before it is seen."""
        return self == Sight()

    def first(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the first token that each of the queries at `positions` [T] sees, [T]."""
        first: npt.NDArray[np.int64] = np.minimum(self.first_key, positions).astype(np.int64)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How one layer wants its attention computed."""

    layer_idx: int
    scaling: float
    sliding_window: int | None
    """Tokens a query sees, itself included; None: all."""
    softcap: float | None
    """Scores are limited to +-softcap by tanh; None: no limit."""
    latent: LatentProjection | None
    """Set for a layer that caches a compressed latent; `key` and `value` then are that latent."""
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """[H] float32, attention sinks: one extra softmax score per head, without a value; None: none."""
    first_key: int = 0
    """Tokens before this one are seen by no query but their own; 0: all tokens are seen."""
    rotates: bool = True
    """Whether queries and keys are rotated by their positions before this call."""
    selection: Selection | None = field(default=None, compare=False)
    """How queries choose the tokens that they see; None: they see all."""
    chunk: int | None = None
    """Tokens in a piece of the context at whose beginning a query's sight ends; None: it doesn't."""
    compression: Compression | None = field(default=None, compare=False)
    """How the layer makes entries of tokens that its window leaves behind, and chooses among them; None: it
    keeps every token's KV."""

    @property
    def sight(self) -> Sight:
        """Which tokens the layer's queries see."""
        return Sight(self.sliding_window, self.chunk, self.first_key)


class StepContext(Protocol):
    """The arguments that a model call carries to its attention layers."""

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Take q [T, H, D], k [T, Hk, D], v [T, Hk, Dv] of the new tokens; return [T, H, Dv]."""
