"""How a prompt differs from an earlier one, as edits that can be undone one by one.

Values are told by the shapes of `divergence`, as a running server tells them; here the parts are
known too, so that an edit says where it stands, and a prompt can be rendered again without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import orjson

from stemma_lab.divergence.shapes import TEXT, VAGUE, Value, parting_value
from stemma_lab.lint.prompts import IMAGE_MARK, RenderedParts, with_message

_WINDOW = 32
"""Characters in which two texts agree again behind a place where they part."""
_MAX_SCANNED = 1 << 16
"""Characters behind the place in which it is looked for."""
_MAX_TEXT_EDITS = 8
_OWN_WORDS = 160
"""Characters that people's own texts must have in common behind their beginnings: less is a phrase."""
_VALUE_TAIL = 64
"""The same behind a value in a user's turn."""
_MARK = re.compile(r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|\[/?[A-Z_]{3,24}\]|</?[a-z]+_of_turn>|<<SYS>>")
"""What templates write around turns."""
_NUMBERED = re.compile(r"(\D*)(\d{1,9})(\D*)")
_MAX_STEP = 1000
_AROUND_TOOL = 32
"""Characters that a template may write around a tool."""


class Rule(StrEnum):
    """What keeps prompts from sharing more."""

    TIMESTAMP = "timestamp"
    NONCE = "nonce"
    COUNTER = "counter"
    VALUE = "changing-value"
    USER_TEXT = "user-text-before-shared-text"
    TOOLS_REORDERED = "reordered-tools"
    TOOLS_CHANGED = "changing-tools"
    TEMPLATE = "template-version"
    SETTINGS = "template-settings"
    IMAGE = "image-before-text"


_RULES = {
    "timestamp": Rule.TIMESTAMP,
    "date": Rule.TIMESTAMP,
    "nonce": Rule.NONCE,
    "uuid": Rule.NONCE,
    "hash": Rule.NONCE,
    "identifier": Rule.NONCE,
    "number": Rule.COUNTER,
    "version": Rule.TEMPLATE,
    "url": Rule.VALUE,
    "email": Rule.VALUE,
    "path": Rule.VALUE,
    "address": Rule.VALUE,
    "name": Rule.USER_TEXT,
    TEXT: Rule.USER_TEXT,
}
"""By shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """One difference of a prompt from an earlier one."""

    rule: Rule
    where: str
    yours: str
    theirs: str
    undone: Callable[[RenderedParts], RenderedParts]
    """Returns the parts with what the earlier prompt had. Edits of one text: the last one first."""
    order: tuple[int, int] = (0, 0)
    """Message and character of an edit in a text."""
    num_own_chars: int = 0
    """What the earlier prompt has in its place: computed there too, so undoing saves nothing of it."""
    reach: int | None = None
    """Characters that are the same behind it, where no more may count. None: all that is saved."""


@dataclass(slots=True)
class Undone:
    """The parts of a prompt with some of its edits undone."""

    parts: RenderedParts
    edits: list[Edit] = field(default_factory=list)

    def with_edit(self, edit: Edit) -> Undone:
        """Return it with one more."""
        return Undone(self.parts, [*self.edits, edit])

    def result(self) -> RenderedParts:
        """Return the parts."""
        parts = self.parts
        for edit in sorted(self.edits, key=lambda one: one.order, reverse=True):
            parts = edit.undone(parts)
        return parts


def edits(now: RenderedParts, earlier: RenderedParts) -> Iterator[Edit]:
    """Yield what `now` has otherwise, of what its author can move or keep."""
    if (now.settings is None) != (earlier.settings is None):
        return
    if now.template != earlier.template:
        yield Edit(
            Rule.TEMPLATE,
            "chat_template",
            now.template or "the model's",
            earlier.template or "the model's",
            lambda parts: replace(parts, template=earlier.template),
        )
    if now.settings != earlier.settings:
        yield Edit(
            Rule.SETTINGS,
            "chat_template_kwargs",
            _json(now.settings),
            _json(earlier.settings),
            lambda parts: replace(parts, settings=earlier.settings),
        )
    if now.tools != earlier.tools:
        yield _tools(now, earlier)
    for number, (yours, theirs) in enumerate(zip(now.messages, earlier.messages, strict=False)):
        if yours == theirs:
            continue
        if yours.get("role") != theirs.get("role") or yours.get("role") in ("assistant", "tool"):
            return  # a conversation is what it is: nothing behind it could stand elsewhere
        follows = _system_follows(now, earlier, number)
        yield from _text_edits(number, yours, theirs, follows=follows)
        if yours.get("role") not in _SYSTEM and not follows:
            return


_SYSTEM = ("system", "developer", "")


def _tools(now: RenderedParts, earlier: RenderedParts) -> Edit:
    yours, theirs = list(map(_spaced, now.tools)), list(map(_spaced, earlier.tools))
    same = sorted(yours) == sorted(theirs)
    gone = [text for text in theirs if text not in set(yours)]
    return Edit(
        Rule.TOOLS_REORDERED if same else Rule.TOOLS_CHANGED,
        "tools",
        ", ".join(_names(now)),
        ", ".join(_names(earlier)),
        lambda parts: replace(parts, tools=earlier.tools),
        num_own_chars=sum(len(text) + _AROUND_TOOL for text in gone),
    )


def _spaced(tool: Mapping[str, Any]) -> str:
    """Return a tool about as templates write it."""
    return json.dumps(tool, default=str, ensure_ascii=False)


def _names(parts: RenderedParts) -> list[str]:
    functions = [tool.get("function") for tool in parts.tools]
    return [str(one.get("name", "")) if isinstance(one, dict) else "" for one in functions]


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS, default=str).decode()


def _system_follows(now: RenderedParts, earlier: RenderedParts, number: int) -> bool:
    """Whether the same message of the system stands behind this one in both."""
    behind = zip(now.messages[number + 1 :], earlier.messages[number + 1 :], strict=False)
    return any(one == other and one.get("role") in _SYSTEM[:2] for one, other in behind)


@dataclass(frozen=True, slots=True)
class _Span:
    """Where two texts differ: [start, end) of each, and how many characters they share behind that."""

    start: int
    end: int
    their_start: int
    their_end: int
    num_behind: int
    shape: str
    is_sure: bool = False
    """Both have a value of that shape there."""


def _text_edits(
    number: int, mine: Mapping[str, Any], other: Mapping[str, Any], *, follows: bool
) -> Iterator[Edit]:
    yours, theirs = mine.get("content"), other.get("content")
    if not isinstance(yours, str) or not isinstance(theirs, str) or yours == theirs:
        return
    role = str(mine.get("role"))
    for span in _spans(yours, theirs):
        rule = _rule(span, yours, theirs, is_raw=not role)
        at_end = span.end == len(yours) and span.their_end == len(theirs)
        is_open = (at_end and follows) or role in _SYSTEM[:2]
        least = _VALUE_TAIL if span.is_sure and rule is not Rule.USER_TEXT else _OWN_WORDS
        if not is_open and span.num_behind < least:
            continue
        if rule is Rule.USER_TEXT and not follows and role in _SYSTEM[:2] and at_end:
            continue  # another system text altogether
        yield Edit(
            rule,
            f"messages[{number}] ({role})" if role else "prompt",
            yours[span.start : span.end],
            theirs[span.their_start : span.their_end],
            _undo(number, span, theirs),
            order=(number, span.start),
            num_own_chars=span.their_end - span.their_start,
            reach=None if is_open else span.num_behind,
        )


def _undo(number: int, span: _Span, theirs: str) -> Callable[[RenderedParts], RenderedParts]:
    instead = theirs[span.their_start : span.their_end]

    def undone(parts: RenderedParts) -> RenderedParts:
        text = str(parts.messages[number]["content"])
        return with_message(parts, number, text[: span.start] + instead + text[span.end :])

    return undone


def _spans(yours: str, theirs: str) -> Iterator[_Span]:
    """Yield where two texts differ, as far as they agree again between."""
    mine = other = last = 0
    for _ in range(_MAX_TEXT_EDITS):
        common = _num_common(yours, mine, theirs, other)
        mine, other = mine + common, other + common
        if mine == len(yours) and other == len(theirs):
            return
        span = _value_span(yours, mine, theirs, other, last) or _resumed(yours, mine, theirs, other)
        yield span
        last = span.end
        mine, other = span.end, span.their_end


def _value_span(yours: str, at: int, theirs: str, their_at: int, first: int) -> _Span | None:
    """Return the span of a value of one shape in both texts, if they go on alike behind it.

    It begins at character `first` of `yours` or later, as far before the place in both.
    """
    one, two = _value(yours, at), _value(theirs, their_at)
    if one is None or two is None or one.shape != two.shape or one.start < first:
        return None
    if at - one.start != their_at - two.start:
        return None
    behind = _num_common(yours, one.end, theirs, two.end)
    ends = one.end == len(yours) and two.end == len(theirs)
    if behind < 8 and not ends:
        return None
    return _Span(one.start, one.end, two.start, two.end, behind, one.shape, is_sure=True)


def _value(text: str, at: int) -> Value | None:
    for mark in IMAGE_MARK.finditer(text, max(0, at - 34), at + 34):
        if mark.start() <= at < mark.end():
            return Value(_IMAGE, mark.start(), mark.end())
    return parting_value(text, at)


_IMAGE = "image"


def _resumed(yours: str, at: int, theirs: str, their_at: int) -> _Span:
    """Return the span up to where both texts have a window in common; to their ends if they never do."""
    value, other = _value(yours, at), _value(theirs, their_at)
    shape = TEXT if value is None else value.shape
    if (shape in VAGUE or shape == _IMAGE) and (other is None or other.shape != shape):
        shape = TEXT
    starts: dict[str, int] = {}
    for start in range(their_at, min(len(theirs), their_at + _MAX_SCANNED) - _WINDOW + 1):
        starts.setdefault(theirs[start : start + _WINDOW], start)
    for start in range(at, min(len(yours), at + _MAX_SCANNED) - _WINDOW + 1):
        found = starts.get(yours[start : start + _WINDOW])
        if found is not None:
            behind = _num_common(yours, start, theirs, found)
            return _Span(at, start, their_at, found, behind, shape)
    return _Span(at, len(yours), their_at, len(theirs), 0, shape)


def _num_common(one: str, start: int, other: str, their_start: int) -> int:
    """Return how many characters two texts share from these places on; by halves, so that C compares."""
    low, high = 0, min(len(one) - start, len(other) - their_start)
    while low < high:
        middle = (low + high + 1) // 2
        if one[start + low : start + middle] == other[their_start + low : their_start + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _rule(span: _Span, yours: str, theirs: str, *, is_raw: bool) -> Rule:
    mine, other = yours[span.start : span.end], theirs[span.their_start : span.their_end]
    if span.shape == _IMAGE:
        return Rule.IMAGE
    if is_raw and (_is_marked(yours, span.start) or _is_marked(theirs, span.their_start)):
        return Rule.TEMPLATE
    if _counts(mine, other):
        return Rule.COUNTER
    return _RULES[span.shape]


def _is_marked(text: str, at: int) -> bool:
    """Whether a mark of a template covers character `at`, or begins in the next few."""
    found = _MARK.finditer(text, max(0, at - 48), at + 64)
    return any(mark.end() > at and mark.start() <= at + 8 for mark in found)


def _counts(one: str, other: str) -> bool:
    """Whether two values are neighbours of one series: ``turn-17``, ``turn-18``."""
    mine, theirs = _NUMBERED.fullmatch(one), _NUMBERED.fullmatch(other)
    if mine is None or theirs is None or mine.group(1, 3) != theirs.group(1, 3):
        return False
    return abs(int(mine[2]) - int(theirs[2])) <= _MAX_STEP
