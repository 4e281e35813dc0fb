"""Grammars that hold only behind a text: the rest of a call, once its beginning stands in the answer.

All else is free, so an answer without such a beginning is what it is without the rule. What is allowed
depends on the output's tokens alone, so neither drafts nor batches change an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

from stemma.engine.sampling.grammar import AllowedTokens, Grammar, GrammarSpec, GrammarState
from stemma.engine.sampling.thinking import SPACE, ThinkingMarks, ThinkingPlace, found_in


@dataclass(frozen=True, slots=True)
class CallRule:
    """What must follow a text in an answer, outside of its thinking."""

    head: bytes
    """The text in UTF-8, without white space: models write that as they like."""
    rest: GrammarSpec


@dataclass(frozen=True, slots=True)
class CallRules:
    """The rules of one request. The first of two that fit counts."""

    rules: tuple[CallRule, ...]
    thinking: ThinkingMarks | None
    """None: the model doesn't think."""
    spelled: Mapping[int, bytes] = field(repr=False, compare=False)
    """The bytes of each token."""


class CallLimit:
    """Where one sequence is in the calls that have rules. Not thread-safe: the step loop's own."""

    def __init__(self, rules: CallRules, grammars: Sequence[Grammar]) -> None:
        """`grammars`: compiled from the rules, in their order."""
        self._rules = rules
        self._grammars = grammars
        self.place = None if rules.thinking is None else ThinkingPlace(rules.thinking)
        self._matched = (0,) * len(rules.rules)
        """Bytes of each head that the output ends with."""
        self.call: GrammarState | None = None
        """The call that is being written, if it has a rule."""

    def allowed(self, ahead: Sequence[int] = ()) -> AllowedTokens | None:
        """Return which tokens may follow the output and then `ahead` (a draft); None: all may."""
        here = self._after(ahead) if ahead else self
        return None if here.call is None else here.call.allowed()

    def num_valid(self, draft: Sequence[int]) -> int:
        """Return how many tokens of `draft`, in order, may be drawn next."""
        later = self._after(())
        for number, token in enumerate(draft):
            if later.call is not None and not later.call.num_valid([token]):
                return number
            later.append(token)
        return len(draft)

    def append(self, token: int) -> None:
        """Record a token of the output. One that is forbidden ends the rule for this call."""
        call = self.call
        begun = self._read(self._rules.spelled[token])
        if call is None:
            self.call = begun
        elif not call.append(token) or call.is_over:
            self.call = None

    def _after(self, tokens: Sequence[int]) -> CallLimit:
        later = copy(self)
        later.place = copy(self.place)
        later.call = None if self.call is None else self.call.copy()
        for token in tokens:
            later.append(token)
        return later

    def _read(self, text: bytes) -> GrammarState | None:
        """Look for heads in `text`, the output's next; return where the call that it begins is then."""
        for at, byte in enumerate(text):
            if (self.place is None or not self._reads_thinking(self.place, byte)) and byte not in SPACE:
                begun = self._found(byte)
                if begun is not None and self.call is None:
                    call = self._grammars[begun].start()
                    # Where a token goes on as the rule forbids, the call stays free.
                    return call if call.append_text(text[at + 1 :]) else None
        return None

    def _found(self, byte: int) -> int | None:
        """Return the number of the rule whose head `byte` ends, if there is one."""
        heads = [rule.head for rule in self._rules.rules]
        matched = [found_in(head, old, byte) for head, old in zip(heads, self._matched, strict=True)]
        begun = next((i for i, head in enumerate(heads) if matched[i] == len(head)), None)
        self._matched = tuple(matched) if begun is None else (0,) * len(heads)
        return begun

    def _reads_thinking(self, place: ThinkingPlace, byte: int) -> bool:
        if self.call is not None:
            return False
        was_thinking = place.is_thinking
        place.read(byte)
        if place.is_thinking:
            self._matched = (0,) * len(self._matched)
        return was_thinking or place.is_thinking
