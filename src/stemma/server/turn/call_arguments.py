"""Arguments of a tool call that a conversation brings back: always an object, always the same one.

A model's text may be cut at its limit, or hold a raw newline in a string. A client sends it back as it came,
so it must become the same prompt each time, and never an error.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
from pydantic_core import from_json

from stemma.errors import InvalidRequest
from stemma.server.schemas.bounds import MAX_JSON_DEPTH
from stemma.server.schemas.json_input import check_counts, depth_exceeds

UNREADABLE = "input"
"""The one argument that holds a text which is no object."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_ESCAPES = {code: f"\\u{code:04x}" for code in range(32)}
_MARKS = re.compile(r'(["\\])')
MAX_REPAIRED_CHARS = 1 << 20
"""Longer texts are passed on as they are."""


def call_arguments(text: str) -> dict[str, Any]:
    """Return the object that `text` is, or begins; else one that holds the text. Never raises."""
    text = text.encode(errors="replace").decode()
    if not text.strip():
        return {}
    try:
        check_counts(text.encode(), "arguments")
        parsed = _parsed(text)
    except (InvalidRequest, ValueError):
        parsed = None
    is_object = isinstance(parsed, dict) and not depth_exceeds(parsed, MAX_JSON_DEPTH)
    return parsed if is_object else {UNREADABLE: text}


def _parsed(text: str) -> Any:
    """Return the value, or what is complete of it; control characters in strings are taken as they are."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if len(text) > MAX_REPAIRED_CHARS:
            raise
        escaped = _STRING.sub(lambda found: found.group().translate(_ESCAPES), text)
        return from_json(escaped, allow_partial="trailing-strings", allow_inf_nan=False)


class ControlEscapes:
    """Escapes control characters in the strings of a JSON text that comes in pieces: parsers refuse them."""

    def __init__(self) -> None:
        self._in_string = False
        self._escaped = False

    def feed(self, piece: str) -> str:
        """Return `piece` as it may be told."""
        found = []
        for part in filter(None, _MARKS.split(piece)):
            first, rest = (part[0], part[1:]) if self._escaped else ("", part)
            self._escaped = False
            if rest == '"':
                self._in_string = not self._in_string
            elif rest == "\\":
                self._escaped = self._in_string
            found.append(first + (rest.translate(_ESCAPES) if self._in_string else rest))
        return "".join(found)


def arguments_text(given: Any, arguments: dict[str, Any]) -> str:
    """Return arguments as JSON: as they were `given` if that is JSON, else what was made of it."""
    try:
        if isinstance(given, str):
            check_counts(given.encode(errors="replace"), "arguments")
            if orjson.loads(given) == arguments:
                return given
    except (InvalidRequest, orjson.JSONDecodeError):
        pass
    return orjson.dumps(arguments).decode()
