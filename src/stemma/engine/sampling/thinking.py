"""A budget of thinking: at so many tokens, the end of the thinking is forced.

Where thinking begins and ends is told by the text of the tokens, however a model cuts it into tokens. What is
forced depends on the output's tokens alone, so neither drafts nor batches change an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache

_SPACE = b" \t\n\r\f\v"
_MOST_LATE = 3
"""Tokens behind the budget that may finish a character which they are parts of."""


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """How a model begins and ends its thinking: the texts, in UTF-8, and the tokens that are forced."""

    start: bytes
    """It begins it, with nothing but white space before it in the output."""
    end: bytes
    """It ends it, and means nothing else."""
    forced: tuple[tuple[int, ...], ...]
    """What is written at the budget, by how many bytes of `end` stand there already."""
    spelled: Mapping[int, bytes] = field(repr=False, compare=False)
    """The bytes of each token."""
    is_open: bool
    """Whether the prompt ends inside the thinking."""
    may_return: bool = False
    """Whether thinking may begin later in the output, and again."""
    forced_again: tuple[int, ...] = ()
    """What is written where thinking begins again behind `forced`; empty: that it does is not looked for."""


class _Stage(Enum):
    BEFORE = auto()
    THINKING = auto()
    OVER = auto()


@lru_cache(maxsize=64)
def _fallbacks(text: bytes) -> tuple[int, ...]:
    """Return, for each beginning of `text`, the length of its longest end that `text` begins with."""
    found = [0]
    for byte in text[1:]:
        found.append(_matched(text, tuple(found), found[-1], byte))
    return tuple(found)


def _matched(text: bytes, fallbacks: Sequence[int], matched: int, byte: int) -> int:
    """Return how many bytes of `text` what was read ends with, after `byte` behind `matched` of them."""
    while matched and text[matched] != byte:
        matched = fallbacks[matched - 1]
    return matched + (text[matched] == byte)


def _num_missing(byte: int, num_missing: int) -> int:
    """Return how many bytes a character lacks after `byte`, where `num_missing` lacked before it."""
    if byte & 0xC0 == 0x80:
        return max(0, num_missing - 1)
    return 0 if byte < 0xC0 else 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3


class ThinkingLimit:
    """Where one sequence is in its thinking. Not thread-safe: the step loop's own."""

    def __init__(self, tokens: ThinkingTokens, max_tokens: int) -> None:
        self._tokens = tokens
        self._max_tokens = max_tokens
        self._stage = _Stage.THINKING if tokens.is_open else _Stage.BEFORE
        self._num_thought = 0
        self._matched = 0
        """Bytes of the text that is looked for which the output ends with."""
        self._num_missing = 0
        """Bytes that the last character of the thinking lacks."""
        self._forced: tuple[int, ...] = ()
        self._was_forced = False
        self._force_at_budget()

    def forced(self, ahead: Sequence[int] = ()) -> int | None:
        """Return the only token that may follow the output and then `ahead` (a draft); None: any may."""
        if ahead:
            later = copy(self)
            for token in ahead:
                later.append(token)
            return later.forced()
        return self._forced[0] if self._forced else None

    def num_valid(self, draft: Sequence[int]) -> int:
        """Return how many tokens of `draft`, in order, may be drawn next."""
        later = copy(self)
        for number, token in enumerate(draft):
            if later.forced() not in (None, token):
                return number
            later.append(token)
        return len(draft)

    def append(self, token: int) -> None:
        """Record a token of the output."""
        if self._forced:
            self._forced = self._forced[1:]
            if not self._forced:
                self._end_forced()
        elif self._stage is not _Stage.OVER:
            was_thinking = self._stage is _Stage.THINKING
            for byte in self._tokens.spelled[token]:
                self._read(byte)
            self._num_thought += was_thinking and self._stage is _Stage.THINKING
            self._force_at_budget()

    def _force_at_budget(self) -> None:
        num_late = self._num_thought - self._max_tokens
        is_whole = not self._num_missing or num_late >= _MOST_LATE
        if self._stage is _Stage.THINKING and num_late >= 0 and is_whole:
            tokens = self._tokens
            self._forced = tokens.forced_again if self._was_forced else tokens.forced[self._matched]

    def _end_forced(self) -> None:
        returns = bool(self._tokens.forced_again) and not self._was_forced
        self._was_forced = True
        self._enter(_Stage.BEFORE if returns else _Stage.OVER)

    def _enter(self, stage: _Stage) -> None:
        self._stage, self._matched, self._num_missing = stage, 0, 0

    def _read(self, byte: int) -> None:
        if self._stage is _Stage.THINKING:
            self._num_missing = _num_missing(byte, self._num_missing)
            if self._finds(self._tokens.end, byte):
                self._enter(_Stage.BEFORE if self._tokens.may_return else _Stage.OVER)
        elif self._stage is _Stage.BEFORE:
            if self._tokens.may_return:
                is_begun = self._finds(self._tokens.start, byte)
            else:
                is_begun = self._goes_on(self._tokens.start, byte)
            if is_begun:
                self._enter(_Stage.THINKING)

    def _finds(self, text: bytes, byte: int) -> bool:
        """Read `byte` of what `text` may stand in anywhere; return whether that is whole."""
        self._matched = _matched(text, _fallbacks(text), self._matched, byte)
        return self._matched == len(text)

    def _goes_on(self, text: bytes, byte: int) -> bool:
        """Read `byte` of what must be `text` behind white space; return whether that is whole."""
        if text[self._matched] == byte:
            self._matched += 1
        elif self._matched or byte not in _SPACE:
            self._enter(_Stage.OVER)
        return self._matched == len(text)
