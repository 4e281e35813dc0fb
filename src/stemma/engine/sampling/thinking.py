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

SPACE = b" \t\n\r\f\v"
_MOST_LATE = 3
"""Tokens behind the budget that may finish a character which they are parts of."""


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The texts, in UTF-8, that begin and end a model's thinking."""

    start: bytes
    """It begins it, with nothing but white space before it in the output."""
    end: bytes
    """It ends it, and means nothing else."""
    is_open: bool
    """Whether the prompt ends inside the thinking."""
    may_return: bool = False
    """Whether thinking may begin later in the output, and again."""


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """What keeps a budget of thinking: its marks, and the tokens that are forced."""

    marks: ThinkingMarks
    forced: tuple[tuple[int, ...], ...]
    """What is written at the budget, by how many bytes of the end stand there already."""
    spelled: Mapping[int, bytes] = field(repr=False, compare=False)
    """The bytes of each token."""
    forced_again: tuple[int, ...] = ()
    """What is written where thinking begins again behind `forced`; empty: that it does is not looked for."""


class _Stage(Enum):
    BEFORE = auto()
    THINKING = auto()
    OVER = auto()


@lru_cache(maxsize=1024)
def _fallbacks(text: bytes) -> tuple[int, ...]:
    """Return, for each beginning of `text`, the length of its longest end that `text` begins with."""
    found = [0]
    for byte in text[1:]:
        found.append(_matched(text, found, found[-1], byte))
    return tuple(found)


def _matched(text: bytes, fallbacks: Sequence[int], matched: int, byte: int) -> int:
    while matched and text[matched] != byte:
        matched = fallbacks[matched - 1]
    return matched + (text[matched] == byte)


def found_in(text: bytes, matched: int, byte: int) -> int:
    """Return how many bytes of `text` what was read ends with, after `byte` behind `matched` of them.

    `matched` is less than all of them.
    """
    return _matched(text, _fallbacks(text), matched, byte)


def _num_missing(byte: int, num_missing: int) -> int:
    """Return how many bytes a character lacks after `byte`, where `num_missing` lacked before it."""
    if byte & 0xC0 == 0x80:
        return max(0, num_missing - 1)
    return 0 if byte < 0xC0 else 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3


class ThinkingPlace:
    """Whether an output is in its thinking, byte by byte."""

    def __init__(self, marks: ThinkingMarks) -> None:
        self._marks = marks
        self._stage = _Stage.THINKING if marks.is_open else _Stage.BEFORE
        self.matched = 0
        """Bytes of the text that is looked for which the output ends with."""
        self.is_within_char = False
        self._num_missing = 0

    @property
    def is_thinking(self) -> bool:
        """Whether what follows is thinking."""
        return self._stage is _Stage.THINKING

    @property
    def is_over(self) -> bool:
        """Whether no thinking can follow."""
        return self._stage is _Stage.OVER

    def leave(self, *, for_good: bool) -> None:
        """The thinking has ended."""
        self._enter(_Stage.OVER if for_good else _Stage.BEFORE)

    def read(self, byte: int) -> None:
        """Read the next byte of the output."""
        if self._stage is _Stage.THINKING:
            self._num_missing = _num_missing(byte, self._num_missing)
            self.is_within_char = self._num_missing > 0
            if self._finds(self._marks.end, byte):
                self.leave(for_good=not self._marks.may_return)
        elif self._stage is _Stage.BEFORE:
            find = self._finds if self._marks.may_return else self._goes_on
            if find(self._marks.start, byte):
                self._enter(_Stage.THINKING)

    def _enter(self, stage: _Stage) -> None:
        self._stage, self.matched, self._num_missing, self.is_within_char = stage, 0, 0, False

    def _finds(self, text: bytes, byte: int) -> bool:
        """Read `byte` of what `text` may stand in anywhere; return whether that is whole."""
        self.matched = found_in(text, self.matched, byte)
        return self.matched == len(text)

    def _goes_on(self, text: bytes, byte: int) -> bool:
        """Read `byte` of what must be `text` behind white space; return whether that is whole."""
        if text[self.matched] == byte:
            self.matched += 1
        elif self.matched or byte not in SPACE:
            self._enter(_Stage.OVER)
        return self.matched == len(text)


class ThinkingLimit:
    """Where one sequence is in its thinking. Not thread-safe: the step loop's own."""

    def __init__(self, tokens: ThinkingTokens, max_tokens: int) -> None:
        self._tokens = tokens
        self._max_tokens = max_tokens
        self.place = ThinkingPlace(tokens.marks)
        self._num_thought = 0
        self._forced: tuple[int, ...] = ()
        self._was_forced = False
        self._force_at_budget()

    def forced(self, ahead: Sequence[int] = ()) -> int | None:
        """Return the only token that may follow the output and then `ahead` (a draft); None: any may."""
        if ahead:
            later = self._copy()
            for token in ahead:
                later.append(token)
            return later.forced()
        return self._forced[0] if self._forced else None

    def num_valid(self, draft: Sequence[int]) -> int:
        """Return how many tokens of `draft`, in order, may be drawn next."""
        later = self._copy()
        for number, token in enumerate(draft):
            if later.forced() not in (None, token):
                return number
            later.append(token)
        return len(draft)

    def append(self, token: int) -> None:
        """Record a token of the output."""
        place = self.place
        if self._forced:
            self._forced = self._forced[1:]
            if not self._forced:
                place.leave(for_good=self._was_forced or not self._tokens.forced_again)
                self._was_forced = True
        elif not place.is_over:
            was_thinking = place.is_thinking
            for byte in self._tokens.spelled[token]:
                place.read(byte)
            self._num_thought += was_thinking and place.is_thinking
            self._force_at_budget()

    def _copy(self) -> ThinkingLimit:
        other = copy(self)
        other.place = copy(self.place)
        return other

    def _force_at_budget(self) -> None:
        num_late = self._num_thought - self._max_tokens
        is_whole = not self.place.is_within_char or num_late >= _MOST_LATE
        if self.place.is_thinking and num_late >= 0 and is_whole:
            tokens = self._tokens
            self._forced = tokens.forced_again if self._was_forced else tokens.forced[self.place.matched]
