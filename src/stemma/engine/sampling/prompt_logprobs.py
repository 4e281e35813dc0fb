"""Log-probabilities of a prompt's own tokens, from the logits of its prefill.

They need the logits of every position, which a prefix hit skips. So a request that wants them computes its
whole prompt, as in vLLM; its blocks are the same as ever and are reused by others. Logits are looked at in
pieces of a few rows, and only what is reported is kept: no [tokens, vocabulary] array exists for a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stemma.engine.sampling.logprobs import likeliest
from stemma.engine.sampling.sampler import rows_at_once
from stemma.types import TokenArray

MAX_REPORTED_VALUES = 1 << 20
"""Log-probabilities reported for one prompt, at most: of the tokens themselves and of the likeliest."""
_LOGITS_PER_STEP = 1 << 24


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """How likely each token of a prompt of N tokens was after those before it; the first has no such number.

    Row i of the arrays is about token i + 1.
    """

    token_ids: TokenArray
    """[N], the prompt."""
    logprobs: npt.NDArray[np.float32]
    """[N - 1]."""
    ranks: npt.NDArray[np.int32]
    """[N - 1]; 1: no token was more likely."""
    top_ids: npt.NDArray[np.int32]
    """[N - 1, K], the likeliest tokens, most likely first."""
    top_logprobs: npt.NDArray[np.float32]
    """[N - 1, K]."""


def num_scored_rows(vocab_size: int, most: int | None) -> int:
    """Return how many prompt positions a step may give logits for; `most` where memory is limited."""
    rows = max(1, _LOGITS_PER_STEP // vocab_size)
    return rows if most is None else max(1, min(rows, most))


class PromptScores:
    """Collects the log-probabilities of one prompt, position by position. One owner, the step loop."""

    def __init__(self, token_ids: TokenArray, num_top: int) -> None:
        num_rows = len(token_ids) - 1
        self._found = PromptLogprobs(
            token_ids,
            np.zeros(num_rows, dtype=np.float32),
            np.zeros(num_rows, dtype=np.int32),
            np.zeros((num_rows, num_top), dtype=np.int32),
            np.zeros((num_rows, num_top), dtype=np.float32),
        )
        self._num_top = num_top
        self.num_scored = 0
        """Leading positions whose logits were seen."""

    @property
    def num_positions(self) -> int:
        """Positions whose logits are wanted: all but the last, which is for the first token of the output."""
        return len(self._found.logprobs)

    @property
    def result(self) -> PromptLogprobs | None:
        """The log-probabilities, once all are there."""
        return self._found if self.num_scored == self.num_positions else None

    def wanted(self, start: int, end: int) -> range:
        """Return the positions in ``[start, end)`` whose logits are still wanted."""
        return range(max(start, self.num_scored), max(start, self.num_scored, min(end, self.num_positions)))

    def add(self, logits: torch.Tensor) -> None:
        """Take the logits [R, V] float32 of the next R positions."""
        at_once = rows_at_once(logits)
        for start in range(0, len(logits), at_once):
            self._add(logits[start : start + at_once])

    def _add(self, logits: torch.Tensor) -> None:
        first = self.num_scored
        end = first + len(logits)
        targets = torch.from_numpy(self._found.token_ids[first + 1 : end + 1].astype(np.int64))
        logprobs = torch.log_softmax(logits, dim=-1)
        own = logprobs.gather(1, targets.to(logits.device)[:, None])
        self._found.logprobs[first:end] = own[:, 0].cpu().numpy()
        self._found.ranks[first:end] = 1 + (logprobs > own).sum(dim=-1).cpu().numpy()
        num_top = min(self._num_top, logits.shape[1])
        if num_top:
            values, ids = likeliest(logprobs, num_top)
            self._found.top_logprobs[first:end, :num_top] = values.cpu().numpy()
            self._found.top_ids[first:end, :num_top] = ids.cpu().numpy()
        self.num_scored = end
