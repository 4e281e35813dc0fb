"""From a rendered conversation to token ids that are, where it brings answers back, the generated ones.

The text between two answers is tokenized by itself. A prompt is thus cut at the same places when it comes
back as the beginning of a longer one, and its ids are the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stemma.model.text.tokenizer import Tokenizer
from stemma.server.history.answers import CONTEXT_TOKENS, AnswerMatch, Place, WrittenAnswer, WrittenAnswers
from stemma.types import TokenArray, as_tokens

Encode = Callable[[str], TokenArray]
_MAX_OPENING_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Parted:
    """Where the text of a prompt parts from an answer that was written there."""

    begin: int
    """Position of the answer's first token."""
    num_agreed: int
    """Leading tokens of the answer that the prompt has."""
    num_thinking_tokens: int
    """Tokens of thinking in the answer, if the prompt has it without them; else 0."""


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The parts that a prompt was made of, and where its answer will begin."""

    place: Place
    context: TokenArray
    """The ids before that, `CONTEXT_TOKENS` at most."""
    opening: TokenArray
    """Ids of the prompt that belong to its answer: what opens its thinking."""
    num_exact_tokens: int = 0
    """Tokens of the prompt that are as they were generated."""
    parted: tuple[Parted, ...] = ()

    def answer(self, token_ids: Sequence[int]) -> WrittenAnswer:
        """Return what was written as it is kept."""
        return WrittenAnswer(self.place, self.context, np.concatenate((self.opening, as_tokens(token_ids))))


@dataclass(frozen=True, slots=True)
class HistoryJoiner:
    """Makes the prompts of one server."""

    written: WrittenAnswers
    tokenizer: Tokenizer
    thinking_begin: str = "<think>"

    def prompt(self, scope: bytes, text: str, encode: Encode) -> tuple[TokenArray, History]:
        """Return the ids of `text`, a rendered conversation, int32, and its history.

        `encode` returns ids without special tokens around them. Raises what it raises.
        """
        matches = self.written.find(scope, text)
        token_ids, begins = _joined(text, matches, encode)
        if matches and not self._reads_the_same(token_ids, text, encode):
            matches, token_ids, begins = [], encode(text), []
        opening = self._opening(text)
        num_opening = self._num_opening_tokens(token_ids, opening)
        if num_opening:
            text = text[: len(text) - len(opening)]
        behind = len(token_ids) - num_opening
        history = History(
            Place.after(scope, text),
            token_ids[max(0, behind - CONTEXT_TOKENS) : behind].copy(),
            token_ids[behind:].copy(),
            sum(len(match.token_ids) for match in matches),
            tuple(
                Parted(begin, len(match.token_ids), match.num_thinking_tokens)
                for begin, match in zip(begins, matches, strict=True)
                if not match.is_whole
            ),
        )
        return token_ids, history

    def _reads_the_same(self, token_ids: TokenArray, text: str, encode: Encode) -> bool:
        """Whether ids that were made in pieces have the text that those of the whole have.

        Where a tokenizer's texts may be cut, they have it. Others may put a space before each piece.
        """
        if self.tokenizer.cuts is not None:
            return True
        return self._text(token_ids) == self._text(encode(text))

    def _opening(self, text: str) -> str:
        """Return what a prompt ends with that opens the answer's thinking, or nothing.

        Templates write it again only where they keep the thinking: it is then part of the answer.
        """
        head = text.rstrip()
        return text[len(head) - len(self.thinking_begin) :] if head.endswith(self.thinking_begin) else ""

    def _num_opening_tokens(self, token_ids: TokenArray, opening: str) -> int:
        """Return how many of the last ids have the text `opening`; 0 if none have."""
        if not opening:
            return 0
        tails = range(1, min(_MAX_OPENING_TOKENS, len(token_ids)) + 1)
        return next((number for number in tails if self._text(token_ids[-number:]) == opening), 0)

    def _text(self, token_ids: TokenArray) -> str:
        return self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)


def _joined(text: str, matches: Sequence[AnswerMatch], encode: Encode) -> tuple[TokenArray, list[int]]:
    """Return the ids of `text`, those of `matches` where they stand, and the token at which each begins."""
    pieces: list[TokenArray] = []
    begins: list[int] = []
    end = num_tokens = 0
    for match in matches:
        before = encode(text[end : match.begin]) if match.begin > end else as_tokens(())
        pieces += [before, match.token_ids]
        begins.append(num_tokens + len(before))
        num_tokens = begins[-1] + len(match.token_ids)
        end = match.end
    if end < len(text) or not pieces:
        pieces.append(encode(text[end:]))
    return np.concatenate(pieces), begins
