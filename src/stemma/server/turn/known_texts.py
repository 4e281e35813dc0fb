"""Token ids of texts that came before: a text that begins as another one did is tokenized from there on.

Texts are kept in pieces, cut where tokenizing begins anew (`model/text/text_cuts.py`), and whole where that
isn't known. Exact by construction: the key is the piece itself, with all that decides its ids. Whether a
piece is known shows in the time of an answer, as a hit of the prefix cache does, so only requests that share
prefixes share texts.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from stemma.model.text.tokenizer import Tokenizer
from stemma.types import TokenArray

MIN_CHARS = 1024
"""Shorter texts take less than half a millisecond and aren't kept."""
MAX_CHARS = 1 << 20
"""Longer ones aren't kept: each would drive out all others."""
MAX_BYTES = 16 << 20
_ENTRY_BYTES = 400


@dataclass(frozen=True, slots=True)
class TextKey:
    """A piece of text, or a whole one, and what decides its ids and who may know it."""

    salt: str
    """Salt of the namespace that the request is served in."""
    add_special_tokens: bool
    """Whether special tokens are added. False for a piece: special tokens are put around the whole."""
    text: str


class KnownTexts:
    """The pieces used last, as far as `max_bytes` reach, texts and ids counted. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[TextKey, TokenArray] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def encode(
        self, tokenizer: Tokenizer, text: str, salt: str, *, add_special_tokens: bool = True
    ) -> TokenArray:
        """Return the ids of `text`, and keep those of its pieces. The array may be read-only.

        Raises ModelError as `Tokenizer.encode` does.
        """
        asked = _Asked.of(tokenizer, text, salt, add_special_tokens=add_special_tokens)
        return self._encode(asked, [self._take(key) for key in asked.keys])

    def find(
        self,
        tokenizer: Tokenizer,
        text: str,
        salt: str,
        *,
        add_special_tokens: bool = True,
        most_new_chars: int = 0,
    ) -> TokenArray | None:
        """Do the same unless more than `most_new_chars` characters would have to be tokenized: then None."""
        asked = _Asked.of(tokenizer, text, salt, add_special_tokens=add_special_tokens)
        found = [self._take(key) for key in asked.keys]
        new = (len(key.text) for key, ids in zip(asked.keys, found, strict=True) if ids is None)
        return None if sum(new) > most_new_chars else self._encode(asked, found)

    def _encode(self, asked: _Asked, found: list[TokenArray | None]) -> TokenArray:
        new = [key for key, ids in zip(asked.keys, found, strict=True) if ids is None]
        encoded = iter(asked.encode([key.text for key in new]) if new else ())
        pieces = [next(encoded) if ids is None else ids for ids in found]
        for key, ids, before in zip(asked.keys, pieces, found, strict=True):
            if before is None and asked.is_kept:
                self._keep(key, ids)
        return asked.join(pieces)

    def _take(self, key: TextKey) -> TokenArray | None:
        with self._lock:
            ids = self._found.get(key)
            if ids is not None:
                self._found.move_to_end(key)
            return ids

    def _keep(self, key: TextKey, ids: TokenArray) -> None:
        """Keep the ids of a piece, which nobody changes afterwards; what was used least lately is dropped."""
        ids.flags.writeable = False
        with self._lock:
            if key in self._found:
                return
            self._found[key] = ids
            self.num_bytes += _size(key, ids)
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(*self._found.popitem(last=False))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A text as it is looked for."""

    keys: Sequence[TextKey]
    is_kept: bool
    encode: Callable[[list[str]], list[TokenArray]]
    join: Callable[[list[TokenArray]], TokenArray]

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str, salt: str, *, add_special_tokens: bool) -> _Asked:
        cuts, is_kept = tokenizer.cuts, MIN_CHARS <= len(text) <= MAX_CHARS
        if cuts is None or not is_kept:
            one = partial(tokenizer.encode, add_special_tokens=add_special_tokens)
            keys = [TextKey(salt, add_special_tokens, text)]
            return cls(keys, is_kept, lambda texts: [one(each) for each in texts], lambda pieces: pieces[0])
        keys = [TextKey(salt, False, piece) for piece in cuts.pieces(text)]
        return cls(
            keys,
            is_kept,
            tokenizer.encode_pieces,
            partial(cuts.joined, add_special_tokens=add_special_tokens),
        )


def _size(key: TextKey, ids: TokenArray) -> int:
    return sys.getsizeof(key.text) + sys.getsizeof(key.salt) + ids.nbytes + _ENTRY_BYTES
