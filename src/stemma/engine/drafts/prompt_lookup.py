"""Drafts from the request itself: what followed the last few tokens earlier in prompt or output.

Prompt lookup decoding (Saxena, 2023), with the longest match instead of the first, and an index that grows
with the sequence instead of a scan of all tokens at each step.
"""

from __future__ import annotations

from collections.abc import Sequence

from stemma.engine.drafts.index_memory import SUFFIX_TOKEN_BYTES, IndexMemory
from stemma.engine.drafts.source import Proposal
from stemma.engine.drafts.suffix import SuffixIndex, evidence_of, last_tokens
from stemma.types import TokenArray

_TOKENS_PER_CALL = 1024
"""Indexed at most in one call, about 1 ms: a long prompt is caught up with over several steps."""


class PromptLookup:
    """A `DraftSource` over the sequence's own tokens.

    Where `memory` has no room for all of them, it drops its index and proposes nothing any more.
    """

    def __init__(self, memory: IndexMemory) -> None:
        self._memory = memory
        self._index: SuffixIndex | None = SuffixIndex()

    def propose(self, tokens: TokenArray, max_tokens: int) -> Proposal | None:
        """Return what followed the longest earlier occurrence of the last tokens."""
        index = self._index
        if index is None:
            return None
        new = tokens[len(index) : len(index) + _TOKENS_PER_CALL].tolist()
        if not self._memory.take(len(new) * SUFFIX_TOKEN_BYTES):
            self.close()
            return None
        index.extend(new)
        if len(index) < len(tokens):
            return None
        found = index.find(last_tokens(tokens), is_own=True)
        if found is None:
            return None
        token_ids = index.continuation(found.position, max_tokens, is_own=True)
        return Proposal(token_ids, evidence_of("lookup", found.length)) if token_ids else None

    def observe(self, tokens: TokenArray, draft: Sequence[int], drawn: Sequence[int]) -> None:
        """Nothing to learn: the tokens that held come back with the next call."""

    def close(self) -> None:
        """Free the index."""
        if self._index is not None:
            self._memory.free(len(self._index) * SUFFIX_TOKEN_BYTES)
            self._index = None
