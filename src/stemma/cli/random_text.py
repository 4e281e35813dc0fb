"""Random text of about a number of tokens, for prompts where only the length matters."""

from __future__ import annotations

import random
from collections.abc import Callable

_NOUNS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city name team "
    "minute idea body back parent face others level office door health person art war history party result "
    "change morning reason research girl guy moment air teacher force education"
)
WORDS = _NOUNS.split()
"""Frequent nouns, about one token each in most vocabularies; for prompts where only the length matters."""


class TextMaker:
    """Makes random text of about a number of tokens; exact up to the tokenizer's merges if there is one."""

    def __init__(self, rng: random.Random, count_tokens: Callable[[str], int] | None = None) -> None:
        self._rng = rng
        self._count = count_tokens

    def num_tokens(self, text: str) -> int:
        """Return the tokens of `text`; without a tokenizer four for three words, as English mostly has."""
        return self._count(text) if self._count is not None else -(-4 * len(text.split()) // 3)

    def text(self, num_tokens: int) -> str:
        """Return random words of about `num_tokens` tokens; at least one word."""
        words = [self._rng.choice(WORDS) for _ in range(max(1, num_tokens))]
        if self._count is None:
            return " ".join(words)
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self._count(" ".join(words[:middle])) <= num_tokens else (low, middle - 1)
            )
        return " ".join(words[:low])
