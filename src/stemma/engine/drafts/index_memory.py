"""Memory of what drafts are looked up in: bounded, and counted by `memory_limit`."""

from __future__ import annotations

from stemma.config.settings import SpeculationSettings

SUFFIX_TOKEN_BYTES = 176
"""Bytes of one token in a `SuffixIndex`, its arrays and its dict just after growing; measured, see the
test."""
MAX_CORPUS_TOKENS = 1 << 18
"""Tokens of finished sequences, all namespaces together."""
MAX_INDEX_BYTES = 128 << 20
"""Indexes of the running sequences together."""


class IndexMemory:
    """The memory that the indexes of running sequences may take together. One owner, the step loop."""

    def __init__(self, max_bytes: int = MAX_INDEX_BYTES) -> None:
        self._num_left = max_bytes

    def take(self, num_bytes: int) -> bool:
        """Return whether there is room, and count it as taken."""
        if num_bytes > self._num_left:
            return False
        self._num_left -= num_bytes
        return True

    def free(self, num_bytes: int) -> None:
        """Free what was taken."""
        self._num_left += num_bytes


def reserved_bytes(settings: SpeculationSettings) -> int:
    """Return how much memory the indexes of drafts take at most."""
    corpus = SUFFIX_TOKEN_BYTES * MAX_CORPUS_TOKENS if settings.mode in ("auto", "tree", "mtp") else 0
    own = MAX_INDEX_BYTES if settings.mode in ("auto", "prompt_lookup", "la", "mtp") else 0
    return corpus + own
