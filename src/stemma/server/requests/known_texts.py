"""Token ids of prompts that came before: who sends the same text again waits for no tokenizer.

Exact by construction: the key is the whole text, with all that decides its ids. Whether a text is known shows
in the time of an answer, as a hit of the prefix cache does, so only requests that share prefixes share texts.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass

from stemma.types import TokenArray

MIN_CHARS = 1024
"""Shorter texts take less than half a millisecond."""
MAX_CHARS = 1 << 20
"""Longer ones would be hashed for a millisecond on the event loop."""
MAX_BYTES = 16 << 20
_ENTRY_BYTES = 400


@dataclass(frozen=True, slots=True)
class TextKey:
    """A text, and what decides its ids and who may know it."""

    salt: str
    """Of the namespace that the request is served in."""
    add_special_tokens: bool
    text: str


class KnownTexts:
    """The texts used last, as far as `max_bytes` reach, texts and ids counted. For one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[TextKey, TokenArray] = OrderedDict()
        self.num_bytes = 0

    def find(self, key: TextKey) -> TokenArray | None:
        """Return the ids of a text, read-only, or None."""
        tokens = self._found.get(key)
        if tokens is not None:
            self._found.move_to_end(key)
        return tokens

    def add(self, key: TextKey, tokens: TokenArray) -> None:
        """Keep the ids of a text, which nobody changes afterwards; what was used least lately is dropped."""
        if not MIN_CHARS <= len(key.text) <= MAX_CHARS or key in self._found:
            return
        tokens.flags.writeable = False
        self._found[key] = tokens
        self.num_bytes += _size(key, tokens)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._found.popitem(last=False))


def _size(key: TextKey, tokens: TokenArray) -> int:
    return sys.getsizeof(key.text) + sys.getsizeof(key.salt) + tokens.nbytes + _ENTRY_BYTES
