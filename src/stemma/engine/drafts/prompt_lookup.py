"""Drafts from the request itself: what followed the last few tokens earlier in prompt or output.

Prompt lookup decoding (Saxena, 2023), with the longest match instead of the first, and an index that grows
with the sequence instead of a scan of all tokens at each step.
"""

from __future__ import annotations

from collections.abc import Sequence

from stemma.engine.drafts.source import Proposal
from stemma.engine.drafts.suffix import SuffixIndex, evidence_of, last_tokens
from stemma.types import TokenArray

_TOKENS_PER_CALL = 1024
"""Indexed at most in one call, about 1 ms: a long prompt is caught up with over several steps."""


class PromptLookup:
    """A `DraftSource` over the sequence's own tokens."""

    def __init__(self) -> None:
        self._index = SuffixIndex()

    def propose(self, tokens: TokenArray, max_tokens: int) -> Proposal | None:
        """Return what followed the longest earlier occurrence of the last tokens."""
        num_indexed = len(self._index)
        self._index.extend(tokens[num_indexed : num_indexed + _TOKENS_PER_CALL].tolist())
        if len(self._index) < len(tokens):
            return None
        found = self._index.find(last_tokens(tokens), is_own=True)
        if found is None:
            return None
        token_ids = self._index.continuation(found.position, max_tokens, is_own=True)
        return Proposal(token_ids, evidence_of("lookup", found.length)) if token_ids else None

    def observe(self, tokens: TokenArray, draft: Sequence[int], drawn: Sequence[int]) -> None:
        """Nothing to learn: the tokens that held come back with the next call."""
