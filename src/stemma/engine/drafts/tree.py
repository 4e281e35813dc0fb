"""The prefix cache as draft model: what earlier requests went on with.

`TreeContinuation`: if the whole sequence so far lies in the radix tree and another one went on from there,
its tokens are the draft. `BranchLookup`: if not, what followed the same last tokens in other branches.
Both see only the sequence's own namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stemma.engine.drafts.source import Proposal
from stemma.engine.drafts.suffix import SuffixCorpus, evidence_of, last_tokens
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray

Continuation = Callable[[Namespace, TokenArray, int], TokenArray]
"""``(namespace, tokens, max_tokens)`` -> tokens that followed `tokens` in the cache (empty: none)."""

_FETCH_TOKENS = 256
"""Read ahead at once: walking the tree is O(sequence), following what was read is O(draft)."""
_MAX_BACKOFF = 128


class TreeContinuation:
    """A `DraftSource` that follows the path of an earlier sequence with the same prefix.

    After a walk that found nothing the next one waits for twice as many tokens, so a long sequence whose
    prefix no other has costs almost nothing.
    """

    def __init__(self, namespace: Namespace, continuation: Continuation) -> None:
        self._namespace = namespace
        self._continuation = continuation
        self._ahead: TokenArray = np.empty(0, dtype=np.int32)
        """Tokens that followed position `_start` of the sequence elsewhere."""
        self._start = 0
        self._retry_at = 0
        self._backoff = 1

    def propose(self, tokens: TokenArray, max_tokens: int) -> Proposal | None:
        """Return the next tokens of the path followed, or of a new one."""
        num_since = len(tokens) - self._start
        is_on_path = num_since < len(self._ahead) and np.array_equal(
            self._ahead[:num_since], tokens[self._start :]
        )
        if not is_on_path:
            if len(tokens) < self._retry_at:
                return None
            self._ahead = self._continuation(self._namespace, tokens, max(max_tokens, _FETCH_TOKENS))
            self._start, num_since = len(tokens), 0
            if not len(self._ahead):
                self._retry_at = len(tokens) + self._backoff
                self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
                return None
            self._backoff = 1
        return Proposal(tuple(self._ahead[num_since : num_since + max_tokens].tolist()), "tree")

    def observe(self, tokens: TokenArray, draft: Sequence[int], drawn: Sequence[int]) -> None:
        """Nothing to learn: leaving the path shows at the next call."""

    def close(self) -> None:
        """Nothing to free: a few tokens are read ahead."""


class BranchLookup:
    """A `DraftSource` over finished sequences of the same namespace, found by their last tokens."""

    def __init__(self, namespace: Namespace, corpus: SuffixCorpus) -> None:
        self._namespace = namespace
        self._corpus = corpus

    def propose(self, tokens: TokenArray, max_tokens: int) -> Proposal | None:
        """Return what followed the same tokens in another sequence, latest and longest match first."""
        token_ids, length = self._corpus.propose(self._namespace, last_tokens(tokens), max_tokens)
        return Proposal(token_ids, evidence_of("branch", length)) if token_ids else None

    def observe(self, tokens: TokenArray, draft: Sequence[int], drawn: Sequence[int]) -> None:
        """Nothing to learn: sequences are added to the corpus when they finish."""

    def close(self) -> None:
        """Nothing to free: the corpus stays."""
