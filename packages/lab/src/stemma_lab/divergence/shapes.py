"""Shapes of the text where two prompts part: a timestamp, an id, a number ...

The shapes of values that programs write into prompts. They are looked for around the place where a prompt
parts from a cached one; the first shape in `SHAPES` with a value there wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Decode = Callable[[Sequence[int]], str]
MAX_VALUE_CHARS = 256
"""Looked at on each side of a place: clients choose the text, and a search may be quadratic."""
TEXT = "text"
"""No value of a known shape: people's own words."""
VAGUE = ("number", "name")
"""Shapes that count only if the cached side has such a value too."""
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_CLOCK = (
    r"[0-2]?\d:[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\.?)?(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"
)
_DATE = (
    r"(?:\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{4}"
    rf"|{_MONTH} \d\d?,? \d{{4}}|\d\d? {_MONTH},? \d{{4}})"
)

SHAPES: dict[str, re.Pattern[str]] = {
    "nonce": re.compile(
        r"\b(?:cch|nonce|salt|seed|(?:trace|request|session|run|message)[-_ ]?id)"
        r"[\"']?\s*[=:]\s*[\"']?[\w.-]{4,64}",
        re.IGNORECASE,
    ),
    "uuid": re.compile(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}"),
    "url": re.compile(r"[A-Za-z][A-Za-z+]*://[^\s<>\"')\];,]+"),
    "email": re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    "timestamp": re.compile(
        rf"{_DATE},?[T ](?:at )?{_CLOCK}|{_CLOCK},? {_DATE}|{_CLOCK}|\b1[4-9]\d{{8}}(?:\d{{3}})?\b"
    ),
    "date": re.compile(_DATE),
    "path": re.compile(r"(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}[/\\]?"),
    "address": re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"),
    "version": re.compile(r"\bv?\d{1,4}\.\d{1,4}\.\d{1,6}(?:[.+-][\w.-]{1,40})?\b"),
    "hash": re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,64}\b"),
    "identifier": re.compile(r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{6,}\b"),
    "number": re.compile(r"[+-]?\d[\d,_]*(?:\.\d+)?"),
    "name": re.compile(r"(?<=[\w,:(] )[A-Z][\w'’-]+(?: [A-Z][\w'’-]+){0,3}"),
}


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a known shape in a text."""

    shape: str
    start: int
    end: int


def value_at(text: str, at: int) -> Value | None:
    """Return the value that covers character `at` of `text`, of the first shape that has one."""
    for shape, pattern in SHAPES.items():
        for found in pattern.finditer(text, max(0, at - MAX_VALUE_CHARS), at + MAX_VALUE_CHARS):
            if found.start() <= at < found.end():
                return Value(shape, found.start(), found.end())
            if found.start() > at:
                break
    return None


def parting_value(text: str, at: int) -> Value | None:
    """Return the value that covers character `at` of `text`, or begins one space behind it."""
    value = value_at(text, at)
    return value_at(text, at + 1) if value is None and text[at : at + 1] == " " else value


def value_from(text: str, start: int, shape: str) -> Value | None:
    """Return the value of `shape` that begins at character `start`, or one space behind it."""
    for found in SHAPES[shape].finditer(text, max(0, start), start + MAX_VALUE_CHARS):
        if found.start() <= start + 1:
            return Value(shape, found.start(), found.end())
        return None
    return None


class TokenStarts:
    """Where each token of a short run begins in its text; texts of single tokens are remembered."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._lengths: dict[int, int] = {}

    def ends(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return where each token ends in `text`, which is what they decode to.

        Sums of single tokens' lengths where these add up; else (a tokenizer that joins tokens with spaces, a
        character of several tokens) every leading part is decoded.
        """
        for token_id in token_ids:
            if token_id not in self._lengths:
                self._lengths[token_id] = len(self.decode([token_id]))
        ends = list(accumulate(self._lengths[token_id] for token_id in token_ids))
        if ends and ends[-1] == len(text):
            return ends
        return [len(self.decode(token_ids[: n + 1])) for n in range(len(token_ids))]
