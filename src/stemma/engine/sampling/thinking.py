"""A budget of thinking: at so many tokens, the end of the thinking is forced.

What is forced depends on the output's tokens alone, so neither drafts nor batches change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """How a model begins and ends its thinking, in tokens."""

    start_ids: tuple[int, ...]
    """They begin it, near the beginning of the output."""
    end_id: int
    """It ends it, and means nothing else."""
    forced_ids: tuple[int, ...]
    """What is written at the budget; `end_id` is among them."""
    is_open: bool
    """Whether the prompt ends inside the thinking."""
    may_return: bool = False
    """Whether thinking may begin again later in the output."""


class _Stage(Enum):
    BEFORE = auto()
    THINKING = auto()
    OVER = auto()


_MOST_BEFORE = 4
"""Tokens, such as white space, that may come before those that begin the thinking."""


class ThinkingLimit:
    """Where one sequence is in its thinking. Not thread-safe: the step loop's own."""

    def __init__(self, tokens: ThinkingTokens, max_tokens: int) -> None:
        self._tokens = tokens
        self._max_tokens = max_tokens
        self._stage = _Stage.THINKING if tokens.is_open else _Stage.BEFORE
        self._num_thought = 0
        self._num_forced = 0
        self._latest: tuple[int, ...] = ()
        """The last tokens before the thinking, as many as begin it."""
        self._num_before = 0

    def forced(self, ahead: Sequence[int] = ()) -> int | None:
        """Return the only token that may follow the output and then `ahead` (a draft); None: any may."""
        if ahead:
            later = copy(self)
            for token in ahead:
                later.append(token)
            return later.forced()
        if self._stage is not _Stage.THINKING or self._num_thought < self._max_tokens:
            return None
        return self._tokens.forced_ids[self._num_forced]

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
        if self._stage is _Stage.THINKING:
            self._think(token)
        elif self._stage is _Stage.BEFORE:
            self._wait(token)

    def _think(self, token: int) -> None:
        is_forced = self._num_thought >= self._max_tokens
        if is_forced and self._num_forced + 1 < len(self._tokens.forced_ids):
            self._num_forced += 1
        elif is_forced or token == self._tokens.end_id:
            self._stage = _Stage.BEFORE if self._tokens.may_return and not is_forced else _Stage.OVER
            self._latest = ()
        else:
            self._num_thought += 1

    def _wait(self, token: int) -> None:
        start_ids = self._tokens.start_ids
        self._num_before += 1
        self._latest = (*self._latest, token)[-len(start_ids) :]
        if self._latest == start_ids:
            self._stage = _Stage.THINKING
        elif self._num_before >= _MOST_BEFORE + len(start_ids) and not self._tokens.may_return:
            self._stage = _Stage.OVER
