"""Texts of single tokens, which log-probabilities and TGI's shape show."""

from __future__ import annotations

from collections.abc import Callable

from stemma.model.tokenizer import Tokenizer

TextOf = Callable[[int], str]
"""From a token's id to its text, special ones included."""


class TokenTexts:
    """A `TextOf` that remembers what it decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """Return the text of one token."""
        text = self._known.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._known[token_id] = text
        return text
