"""One vector of a prompt instead of an answer: pooled hidden states, or logits of a few tokens.

What the last token gives needs the last token alone, so a prefix hit is used as ever. The mean of all tokens
needs all hidden states, which no tier holds: such a prompt is computed whole, as for its log-probabilities.
Rows are added one by one in order of positions, so a result depends neither on chunks nor on neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from stemma.model.opened.abilities import PoolingKind

Vector: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pooling:
    """A request for a prompt's vector: which tokens count, and how it is scaled."""

    kind: PoolingKind | Literal["logits"]
    token_ids: tuple[int, ...] = ()
    """For `logits`: the tokens whose logits are wanted, behind the prompt's last token."""

    @property
    def needs_hidden(self) -> bool:
        """Whether it is made of hidden states."""
        return self.kind != "logits"


class PooledPrompt:
    """Collects the vector of one prompt, chunk by chunk. One owner, the step loop."""

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        """`num_tokens`: of the prompt."""
        self.pooling = pooling
        self._num_tokens = num_tokens
        self._num_added = 0
        self._sum: npt.NDArray[np.float64] | None = None
        self.result: Vector | None = None
        """The hidden state [H], the mean of all, or the logits [K], once it is there."""

    @property
    def max_cached(self) -> int | None:
        """Leading tokens that need not be computed, at most; None: however many are cached."""
        if self.result is not None or self.pooling.kind in ("last", "logits"):
            return None
        return self._num_added

    def add(self, start: int, hidden: torch.Tensor | None, logits: torch.Tensor | None) -> None:
        """Take what a step gave: states [N, H] of positions from `start` on, and the last token's logits.

        `hidden` None: not asked for. `logits` [V], None: the prompt goes on.
        """
        if self.result is not None:
            return
        if self.pooling.kind == "logits":
            if logits is not None:
                chosen = logits[list(self.pooling.token_ids)]
                self.result = chosen.float().cpu().numpy()
            return
        assert hidden is not None
        if self.pooling.kind == "mean":
            self._add_rows(start, hidden)
        elif self.pooling.kind == "cls":
            self.result = _row(hidden, 0) if start == 0 else None
        elif logits is not None:
            self.result = _row(hidden, -1)

    def _add_rows(self, start: int, hidden: torch.Tensor) -> None:
        rows = hidden[self._num_added - start :].double().cpu().numpy()
        if self._sum is None:
            self._sum = np.zeros(hidden.shape[1], dtype=np.float64)
        for row in rows:
            self._sum += row
        self._num_added += len(rows)
        if self._num_added == self._num_tokens:
            self.result = (self._sum / self._num_tokens).astype(np.float32)


def _row(hidden: torch.Tensor, row: int) -> Vector:
    found: Vector = hidden[row].float().cpu().numpy().copy()
    return found
