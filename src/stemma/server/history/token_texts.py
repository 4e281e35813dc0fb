"""Where the text of a run of token ids agrees with another text."""

from __future__ import annotations

from dataclasses import dataclass

from stemma.model.text.tokenizer import Tokenizer
from stemma.types import TokenArray

_INCOMPLETE = "\ufffd"
"""Text of a character whose bytes aren't all there."""
_MAX_PIECES = 4
"""Tokens that one character may be cut into."""
_MAX_WORD_PIECES = 8
"""Tokens that are given up so that a cut stands beside a word, not in it."""
_FIRST_WORDLESS = "\u2e80"
"""From here on letters are of scripts that set no spaces: tokenizers cut them anywhere."""


@dataclass(frozen=True, slots=True)
class HeadTexts:
    """The texts of the heads of some token ids, as they read behind others."""

    tokenizer: Tokenizer
    token_ids: TokenArray
    context: TokenArray
    """Ids before them: of some tokenizers the first token of a text reads otherwise than one within."""

    def head(self, number: int) -> str:
        """Return the text of the first `number` ids; empty where it can't be told from that before it."""
        before = self._decode([]) if len(self.context) else ""
        whole = self._decode(self.token_ids[:number].tolist())
        return whole[len(before) :] if whole.startswith(before) else ""

    def num_within(self, text: str, begin: int = 0) -> int:
        """Return how many leading ids have a text with which `text` goes on at `begin`; found by halving."""
        low, high = 0, len(self.token_ids)
        while low < high:
            middle = (low + high + 1) // 2
            if text.startswith(self.head(middle).rstrip(_INCOMPLETE), begin):
                low = middle
            else:
                high = middle - 1
        for number in range(low, max(0, low - _MAX_PIECES), -1):
            if text.startswith(self.head(number), begin):
                return number
        return 0

    def num_whole_words(self, text: str, begin: int) -> int:
        """Do the same, but end beside a word of `text`: within one, its rest would be tokenized by itself."""
        most = self.num_within(text, begin)
        for number in range(most, max(0, most - _MAX_WORD_PIECES), -1):
            head = self.head(number)
            if text.startswith(head, begin) and not _is_within_word(text, begin + len(head)):
                return number
        return 0

    def num_to_reach(self, num_chars: int) -> int:
        """Return how many leading ids it takes for a text of `num_chars` characters."""
        low, high = 0, len(self.token_ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.head(middle)) >= num_chars:
                high = middle
            else:
                low = middle + 1
        return low

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode([*self.context.tolist(), *token_ids], skip_special_tokens=False)


def _is_within_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and _is_letter(text[at - 1]) and _is_letter(text[at])


def _is_letter(char: str) -> bool:
    return char.isalnum() and char < _FIRST_WORDLESS
