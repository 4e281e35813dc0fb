"""JSON that arrives in pieces: where a value ends, and a call's name and arguments as they come."""

from __future__ import annotations

import json
from enum import Enum, auto

_SPACE = " \t\r\n"


class ValueEnd:
    """Finds where one JSON object or array ends. It checks brackets and strings, nothing else."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, char: str) -> bool:
        """Take the next character, the opening bracket first; return whether the value is complete."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return False
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return self._depth == 0


class _Stage(Enum):
    BEFORE = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER_VALUE = auto()
    COMPLETE = auto()
    BROKEN = auto()


class CallObject:
    """Reads ``{"name": ..., "arguments": {...}}`` (or ``parameters``) character by character.

    `name` is set once it is known. `take_arguments` returns the JSON text of the arguments that has arrived.
    Arguments before the name wait for it; arguments that are a string hold JSON text themselves.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw = ""
        self._stage = _Stage.BEFORE
        self._key = ""
        self._value = ""
        self._end: ValueEnd | None = None
        self._arguments = ""
        self._has_arguments = False

    @property
    def complete(self) -> bool:
        """Whether the object's closing brace has arrived."""
        return self._stage is _Stage.COMPLETE

    @property
    def broken(self) -> bool:
        """Whether this is no call: not JSON, or an object without a name."""
        return self._stage is _Stage.BROKEN

    def take_arguments(self) -> str:
        """Return the text of the arguments since the last call; empty until the name is known."""
        if self.name is None:
            return ""
        text, self._arguments = self._arguments, ""
        return text

    def feed(self, text: str) -> str:
        """Read `text` up to the end of the object; return what follows the object."""
        for position, char in enumerate(text):
            if self.complete or self.broken:
                return text[position:]
            self.raw += char
            self._step(char)
        return ""

    def _step(self, char: str) -> None:
        stage = self._stage
        if stage is _Stage.IN_KEY:
            self._read_key(char)
        elif stage is _Stage.IN_VALUE:
            self._read_value(char)
        elif char in _SPACE:
            return
        elif stage is _Stage.BEFORE and char == "{":
            self._stage = _Stage.KEY
        elif stage is _Stage.KEY and char == '"':
            self._stage, self._key = _Stage.IN_KEY, char
        elif stage is _Stage.COLON and char == ":":
            self._stage = _Stage.VALUE
        elif stage is _Stage.VALUE:
            self._stage, self._value, self._end = _Stage.IN_VALUE, "", None
            self._read_value(char)
        elif stage is _Stage.AFTER_VALUE and char == ",":
            self._stage = _Stage.KEY
        elif stage in (_Stage.AFTER_VALUE, _Stage.KEY) and char == "}":
            self._finish()
        else:
            self._stage = _Stage.BROKEN

    def _read_key(self, char: str) -> None:
        self._key += char
        if char == '"' and not _escaped_end(self._key):
            self._stage = _Stage.COLON

    def _read_value(self, char: str) -> None:
        if not self._value:
            self._end = ValueEnd() if char in "{[" else None
        if self._end is not None:
            self._value += char
            if self._key in _ARGUMENT_KEYS:
                self._has_arguments = True
                self._arguments += char
            if self._end.feed(char):
                self._close_value()
        elif self._value.startswith('"') or (not self._value and char == '"'):
            self._value += char
            if len(self._value) > 1 and char == '"' and not _escaped_end(self._value):
                self._close_value()
        elif char in ",}" or char in _SPACE:
            self._close_value()
            self._step(char)
        else:
            self._value += char

    def _close_value(self) -> None:
        self._stage = _Stage.AFTER_VALUE
        if self._key == '"name"':
            name = _string(self._value)
            if not name:
                self._stage = _Stage.BROKEN
            self.name = name
        elif self._key in _ARGUMENT_KEYS and not self._value.startswith(("{", "[")):
            self._has_arguments = True
            self._arguments += _string(self._value) or ("{}" if self._value == "null" else self._value)

    def _finish(self) -> None:
        if self.name is None:
            self._stage = _Stage.BROKEN
            return
        if not self._has_arguments:
            self._arguments = "{}"
        self._stage = _Stage.COMPLETE


_ARGUMENT_KEYS = ('"arguments"', '"parameters"')


def _escaped_end(text: str) -> bool:
    """Return whether the last character of a JSON string is escaped."""
    before = text[:-1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _string(text: str) -> str | None:
    """Return the string that JSON `text` is, or None."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
