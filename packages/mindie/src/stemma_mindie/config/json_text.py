"""Read JSON that a person wrote: every fault is named with its line and column, and so is every key.

`json.loads` stops at the first fault. Files that were copied from a manual often have several, so this reader
recovers (a missing colon or comma is assumed, an open brace is closed at the end) and reports them together.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stemma.errors import ConfigError

JsonPath = tuple[str | int, ...]

MAX_DEPTH = 64
MAX_FAULTS = 8
_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])*")
      | (?P<number>-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<mark>[{}\[\],:])
      | (?P<space>[ \t\r\n]+)
      | (?P<bad>.)""",
    re.VERBOSE | re.DOTALL,
)
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_CLOSED_BY = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class JsonDocument:
    """A parsed file and where its keys are."""

    value: dict[str, Any]
    positions: Mapping[JsonPath, tuple[int, int]]
    """(line, column), from 1, of each key and list item."""

    def where(self, path: JsonPath) -> str:
        """Return e.g. ``line 3, column 9`` for the longest known part of `path`."""
        while path and path not in self.positions:
            path = path[:-1]
        line, column = self.positions.get(path, (1, 1))
        return f"line {line}, column {column}"


def read_json(text: str) -> JsonDocument:
    """Return the object that `text` holds. Raises ConfigError that lists the faults, one a line."""
    reader = _Reader(text)
    value = reader.document()
    if reader.faults:
        faults = sorted(reader.faults)
        lines = [f"{reader.place(offset)}: {message}" for offset, message in faults[:MAX_FAULTS]]
        if len(faults) > MAX_FAULTS:
            lines.append(f"and {len(faults) - MAX_FAULTS} more")
        raise ConfigError("not valid JSON\n  " + "\n  ".join(lines))
    assert isinstance(value, dict)
    positions = {path: reader.line_and_column(offset) for path, offset in reader.offsets.items()}
    return JsonDocument(value, positions)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    offset: int

    def __str__(self) -> str:
        shown = self.text if len(self.text) <= 40 else self.text[:37] + "..."
        return "the end of the file" if self.kind == "end" else shown


@dataclass(slots=True)
class _Reader:
    """Recursive descent over the tokens of one text."""

    text: str
    faults: list[tuple[int, str]] = field(default_factory=list)
    offsets: dict[JsonPath, int] = field(default_factory=dict)
    _tokens: list[_Token] = field(default_factory=list)
    _next: int = 0
    _line_starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._line_starts = [0, *(found.end() for found in re.finditer("\n", self.text))]
        for found in _TOKEN.finditer(self.text):
            kind = found.lastgroup or "bad"
            if kind != "space":
                self._tokens.append(_Token(kind, found.group(), found.start()))
        self._tokens.append(_Token("end", "", len(self.text.rstrip())))

    def line_and_column(self, offset: int) -> tuple[int, int]:
        """Return both, from 1."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def place(self, offset: int) -> str:
        """Return ``line 3, column 9``."""
        line, column = self.line_and_column(offset)
        return f"line {line}, column {column}"

    def document(self) -> Any:
        """Return the value of the whole text, which must be one object."""
        first = self._peek()
        if first.kind == "string" and self._tokens[1].text == ":":
            self._fault(first, "the file must be one object: put { before this and } at the end")
            return self._members((), "", first, depth=1)
        if first.text != "{":
            self._fault(first, f"the file must be one object; expected {{, found {first}")
            return {}
        value = self._value((), depth=0)
        rest = self._peek()
        if rest.kind != "end":
            self._fault(rest, f"the object ends before this; found {rest} after it")
        return value

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        if token.kind != "end":
            self._next += 1
        return token

    def _fault(self, token: _Token, message: str) -> None:
        self.faults.append((token.offset, message))

    def _value(self, path: JsonPath, depth: int) -> Any:
        token = self._peek()
        if token.text in ("{", "[") and token.kind == "mark":
            if depth >= MAX_DEPTH:
                raise ConfigError(
                    f"not valid JSON\n  {self.place(token.offset)}: nested deeper than {MAX_DEPTH}"
                )
            self._take()
            if token.text == "{":
                return self._members(path, "}", token, depth + 1)
            return self._items(path, token, depth + 1)
        if token.text in (",", "}", "]") or token.kind == "end":
            self._fault(token, f"expected a value, found {token}")
            return None
        self._take()
        return self._scalar(token)

    def _scalar(self, token: _Token) -> Any:
        if token.kind == "word" and token.text in _WORDS:
            return _WORDS[token.text]
        if token.kind in ("string", "number"):
            try:
                return json.loads(token.text)
            except ValueError as error:
                self._fault(token, f"{token}: {error}")
                return None
        self._fault(token, f"expected a value, found {token}")
        return None

    def _members(self, path: JsonPath, closing: str, opened: _Token, depth: int) -> dict[str, Any]:
        """Return the members of an object up to its brace; `closing` is empty for a file without braces."""
        members: dict[str, Any] = {}
        while True:
            token = self._take()
            if token.text == closing and token.kind == "mark":
                return members
            if token.kind == "end":
                if closing:
                    self._unclosed(path, opened)
                return members
            if token.kind != "string":
                self._fault(token, f"expected a key in double quotes, found {token}")
                if token.text in ("}", "]"):
                    return members
                continue
            self._member(members, path, token, depth)
            self._separator(closing)

    def _member(self, members: dict[str, Any], path: JsonPath, token: _Token, depth: int) -> None:
        key = self._scalar(token)
        here = (*path, str(key))
        if key in members:
            self._fault(token, f"{token} is given twice in one object")
        self.offsets[here] = token.offset
        if self._peek().text == ":":
            self._take()
        else:
            self._fault(self._peek(), f"expected ':' between {token} and {self._peek()}")
        members[str(key)] = self._value(here, depth)

    def _items(self, path: JsonPath, opened: _Token, depth: int) -> list[Any]:
        items: list[Any] = []
        while True:
            token = self._peek()
            if token.text == "]":
                self._take()
                return items
            if token.kind == "end" or token.text == "}":
                self._unclosed(path, opened)
                return items
            here = (*path, len(items))
            self.offsets[here] = token.offset
            items.append(self._value(here, depth))
            self._separator("]")

    def _separator(self, closing: str) -> None:
        """Take the comma after a member or item; complain if it is missing or nothing follows it."""
        token = self._peek()
        if token.text == ",":
            self._take()
            after = self._peek()
            if after.kind == "mark" and after.text == closing:
                self._fault(token, f"a comma before {after}")
            return
        if token.text not in ("}", "]") and token.kind != "end":
            self._fault(token, f"expected ',' or '{closing or '}'}', found {token}")
            if token.text == ":":
                self._take()

    def _unclosed(self, path: JsonPath, opened: _Token) -> None:
        name = f' of "{path[-1]}"' if path and isinstance(path[-1], str) else ""
        closing = _CLOSED_BY.get(opened.text, "}")
        self._fault(opened, f"the {opened.text}{name} that opens here is never closed: {closing} is missing")
