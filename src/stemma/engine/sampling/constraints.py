"""Tokens that a request forbids or favours: grammar, bias, allowed ids, bad words.

A `Constraints` belongs to one sequence and is asked for every row of its logits. Where a request's own rules
leave no token at all, they are ignored for that row: a sequence must be able to go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stemma.engine.sampling.grammar import AllowedTokens, GrammarState
from stemma.engine.sampling.params import SamplingParams


class Constraints:
    """What one sequence may draw. Not thread-safe: the step loop's own."""

    def __init__(self, params: SamplingParams, vocab_size: int, grammar: GrammarState | None) -> None:
        self._grammar = grammar
        self._vocab_size = vocab_size
        bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocab_size]
        self._bias_ids = torch.tensor([token for token, _ in bias], dtype=torch.int64)
        self._bias_values = torch.tensor([value for _, value in bias], dtype=torch.float32)
        self._only: AllowedTokens | None = None
        if params.allowed_token_ids:
            self._only = np.zeros(vocab_size, dtype=np.bool_)
            self._only[[token for token in params.allowed_token_ids if 0 <= token < vocab_size]] = True
        self._bad_words = params.bad_words
        self._num_kept = max((len(word) for word in self._bad_words), default=1) - 1
        self._output: list[int] = []
        """The last tokens of the output: as many as a bad word has before its last one."""

    @property
    def has_grammar(self) -> bool:
        """Whether the end of the output is the grammar's to tell."""
        return self._grammar is not None

    def append(self, token_id: int) -> None:
        """Record a token of the output."""
        if self._grammar is not None:
            self._grammar.append(token_id)
        if self._num_kept:
            self._output = [*self._output, token_id][-self._num_kept :]

    def num_valid(self, draft: Sequence[int]) -> int:
        """Return how many tokens of `draft`, in order, the grammar allows next."""
        return len(draft) if self._grammar is None else self._grammar.num_valid(draft)

    def apply(self, logits: torch.Tensor, ahead: Sequence[int]) -> None:
        """Change `logits` [V] float32, which follow the output and then `ahead` (a draft), in place."""
        if len(self._bias_ids):
            logits[self._bias_ids.to(logits.device)] += self._bias_values.to(logits.device)
        allowed = self._allowed(ahead)
        if allowed is not None and allowed.any():
            forbidden = torch.from_numpy(~allowed).to(logits.device)
            # A bias or a penalty may have made every allowed logit -inf already: then the rule is ignored.
            if bool(torch.isfinite(logits.masked_fill(forbidden, -torch.inf)).any()):
                logits.masked_fill_(forbidden, -torch.inf)

    def _allowed(self, ahead: Sequence[int]) -> AllowedTokens | None:
        allowed = None if self._grammar is None else self._grammar.allowed(ahead)
        if self._only is not None:
            allowed = self._only
        bad = [word[-1] for word in self._bad_words if self._ends_with(word[:-1], ahead)]
        bad = [token for token in bad if 0 <= token < self._vocab_size]
        if not bad:
            return allowed
        kept = np.ones(self._vocab_size, dtype=np.bool_) if allowed is None else allowed.copy()
        kept[bad] = False
        return kept if kept.any() else allowed

    def _ends_with(self, words: Sequence[int], ahead: Sequence[int]) -> bool:
        if not words:
            return True
        text = [*self._output, *ahead]
        return text[-len(words) :] == list(words)
