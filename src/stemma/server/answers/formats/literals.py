"""Values as programming languages write them (Python, Gemma's short form), told as JSON."""

from __future__ import annotations

import json
import re

from stemma.server.answers.json_text import escaped
from stemma.server.answers.scanning import Markers, Reading, Scanner, Tell

PYTHON_QUOTES = ('"""', "'''", '"', "'")
_CLOSER = {"{": "}", "[": "]", "(": "]"}
_WORD = re.compile(r"[^\s,:=(){}\[\]\"'<]*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def value(scanner: Scanner, tell: Tell, quotes: tuple[str, ...] = PYTHON_QUOTES) -> Reading[None]:
    """Tell the value that follows as JSON, as it comes. It ends where it is complete or can't go on.

    `quotes`: what strings stand between; a backslash means something within one-character quotes.
    """
    closers: list[str] = []
    comma, key = "", False
    while True:
        yield from scanner.space()
        char = yield from scanner.peek()
        if char == "," and closers:
            yield from scanner.chars(1)
            comma, key = ", ", closers[-1] == "}"
            continue
        if char == ":" and closers:
            yield from scanner.chars(1)
            tell(": ")
            comma, key = "", False
            continue
        if char and char in ")]}":
            if not closers:
                return
            yield from scanner.chars(1)
            tell(closers.pop())
            comma = ""
        elif char in _CLOSER:
            tell(comma + ("{" if char == "{" else "["))
            closers.append(_CLOSER[char])
            yield from scanner.chars(1)
            comma, key = "", char == "{"
        elif quote := (yield from scanner.accept(*quotes)):
            tell(comma + '"')
            yield from _string(scanner, tell, quote)
            comma = ""
        else:
            word = yield from scanner.word(_WORD)
            if not word:
                if char:
                    tell("".join(reversed(closers)))
                return
            tell(comma + (json.dumps(word, ensure_ascii=False) if key else _word_as_json(word)))
            comma = ""
        if not closers:
            return


def _string(scanner: Scanner, tell: Tell, quote: str) -> Reading[None]:
    """Tell the rest of a string behind its first quote; one that is cut off stays open."""
    escapes = ("\\",) if quote in PYTHON_QUOTES else ()
    ends = Markers(quote, *escapes)
    while True:
        marker = yield from scanner.until(ends, lambda text: tell(escaped(text)))
        if marker == "\\":
            tell(escaped((yield from _escape(scanner))))
            continue
        if marker is not None:
            tell('"')
        return


def _escape(scanner: Scanner) -> Reading[str]:
    char = yield from scanner.chars(1)
    digits = yield from scanner.chars(_HEX_DIGITS.get(char, 0))
    if digits:
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            return "\\" + char + digits
    known = _ESCAPES.get(char)
    if known is not None:
        return known
    return char if char in "\\'\"" else "\\" + char


def _word_as_json(word: str) -> str:
    if word in _WORDS:
        return _WORDS[word]
    plain = word.replace("_", "")
    return plain if _NUMBER.fullmatch(plain) else json.dumps(word, ensure_ascii=False)


def literal_as_json(text: str) -> str | None:
    """Return `text`, a whole value of JSON or Python, as JSON; None if it is neither."""
    if _is_json(text):
        return text
    if text in _WORDS or text.lower() in ("true", "false", "null"):
        return _WORDS.get(text) or text.lower()
    if not text.startswith(("[", "{", "(")):
        return None
    scanner, pieces = Scanner(), list[str]()
    scanner.add(text)
    scanner.ended = True
    for _ in value(scanner, pieces.append):
        pass
    found = "".join(pieces)
    return found if scanner.is_over and _is_json(found) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(word)
