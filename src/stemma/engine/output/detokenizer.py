"""Streaming detokenization: token ids in, whole characters out.

Tokens of a byte-level vocabulary are bytes, which an incremental UTF-8 decoder takes. For others a short
window of recent tokens is decoded again with each new token, and what it shows beyond the text already
emitted is the delta. The window keeps tokens before the new one because their neighbours decide
about spaces; before the first one it has one of the prompt's. Text that ends in U+FFFD may be the head of a
character whose other bytes are still to come, so it is held back. The window is cut where decoding the rest
alone gives the same text, so a token costs one decode of at most `_MAX_WINDOW` tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from typing_extensions import override

from stemma.model.text.tokenizer import Tokenizer
from stemma.types import TokenArray

_REPLACEMENT = "\ufffd"
_LONG_WINDOW = 12
"""Tokens after which the window is cut."""
_MAX_HELD = 6
"""Tokens that may end in U+FFFD before the window is cut inside the run: a character has 4 bytes at most."""
_MAX_WINDOW = 64
"""Tokens after which the window starts anew even if no clean cut was found."""
_NUM_BEFORE = 8
"""Tokens of a prompt that are looked at, at most, for one that an answer is decoded behind."""


_make_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one growing token sequence, in deltas of whole characters.

    The deltas and the `flush` joined are ``decoder.decode(all tokens)``, without the text of a prompt before.
    """

    def append(self, token_id: int) -> str:
        """Take one more token and return the text that it completes, often one word, sometimes nothing."""

    def extend(self, token_ids: Iterable[int]) -> str:
        """Take several tokens: the texts of `append`, joined."""

    def flush(self) -> str:
        """Return what is still held back: bytes that no later token will complete."""


class TokenDecoder(Protocol):
    """The part of `model.tokenizer.Tokenizer` that is needed here."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that have no text of their own."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; incomplete UTF-8 becomes U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """`Detokenizer` for byte-level vocabularies."""

    def __init__(self, token_bytes: Mapping[int, bytes], hidden: frozenset[int]) -> None:
        """`hidden`: ids that have no text."""
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._utf8 = _make_utf8_decoder("replace")

    @override
    def append(self, token_id: int) -> str:
        return "" if token_id in self._hidden else self._utf8.decode(self._token_bytes[token_id])

    @override
    def extend(self, token_ids: Iterable[int]) -> str:
        known, hidden = self._token_bytes, self._hidden
        return self._utf8.decode(b"".join([known[one] for one in token_ids if one not in hidden]))

    @override
    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class WindowDetokenizer(Detokenizer):
    """`Detokenizer` for any vocabulary.

    SentencePiece with byte fallback turns a whole run of byte tokens into U+FFFD if its end is not valid
    UTF-8; there the valid part, already emitted, stays.
    """

    def __init__(
        self, decoder: TokenDecoder, *, skip_special_tokens: bool = True, before: Sequence[int] = ()
    ) -> None:
        """`before`: the last tokens of the prompt; an answer that goes on with its text keeps its space."""
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._hidden = decoder.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window = self._neighbour(before)
        self._text = self._decode(self._window) if self._window else ""
        self._num_emitted = len(self._text)
        self._num_held = 0

    @override
    def append(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        self._text = self._decode(self._window)
        if self._text.endswith(_REPLACEMENT):
            self._num_held += 1
            return self._cut_inside_run() if self._num_held >= _MAX_HELD else ""
        delta = self._text[self._num_emitted :]
        self._num_emitted = len(self._text)
        self._num_held = 0
        if len(self._window) >= _LONG_WINDOW:
            self._cut()
        return delta

    @override
    def extend(self, token_ids: Iterable[int]) -> str:
        return "".join([self.append(token_id) for token_id in token_ids])

    @override
    def flush(self) -> str:
        delta = self._text[self._num_emitted :]
        self._num_emitted = len(self._text)
        self._num_held = 0
        return delta

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _neighbour(self, before: Sequence[int]) -> list[int]:
        """Return the last token of `before` that is whole characters: what counts is that there is one.

        None behind a special token: what follows begins a text of its own, whose first space isn't shown.
        """
        for token_id in reversed(before):
            if token_id in self._decoder.special_token_ids:
                return []
            text = self._decode([token_id])
            if text and _REPLACEMENT not in text:
                return [token_id]
        return []

    def _cut(self) -> None:
        """Shorten the window; its text is complete and emitted."""
        for start in range(len(self._window) - 2, 0, -1):
            rest = self._decode(self._window[start:])
            if rest and self._text.endswith(rest):
                self._keep_from(start, rest, num_emitted=len(rest))
                return
        if len(self._window) >= _MAX_WINDOW:
            self._keep_from(len(self._window), "", num_emitted=0)

    def _cut_inside_run(self) -> str:
        """Emit the decided head of a window that ends in many U+FFFD: the model wrote invalid UTF-8.

        Two parts whose texts joined are the text of the whole don't share a character, whatever follows.
        """
        self._num_held = 0
        for start in range(len(self._window) - 1, 0, -1):
            head, rest = self._decode(self._window[:start]), self._decode(self._window[start:])
            if rest and head + rest == self._text and len(head) >= self._num_emitted:
                delta = head[self._num_emitted :]
                self._keep_from(start, rest, num_emitted=0)
                return delta
        if len(self._window) < _MAX_WINDOW:
            return ""
        delta = self.flush()
        self._keep_from(len(self._window), "", num_emitted=0)
        return delta

    def _keep_from(self, start: int, text: str, *, num_emitted: int) -> None:
        del self._window[:start]
        self._text = text
        self._num_emitted = num_emitted


def make_detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt: Sequence[int] | TokenArray = ()
) -> Detokenizer:
    """Return the fastest that decodes as `tokenizer` does what follows `prompt`."""
    if tokenizer.token_bytes is None:
        before = [int(token_id) for token_id in prompt[-_NUM_BEFORE:]]
        return WindowDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens, before=before)
    hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
    return ByteDetokenizer(tokenizer.token_bytes, hidden)
