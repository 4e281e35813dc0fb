"""JSON that arrives in pieces: values, and calls as objects with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Reading, Scanner, Tell

_BETWEEN_STRINGS = re.compile(r'[^"{}\[\]<]*')
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r'[^\s,{}\[\]<"]*')
_CLOSER = {"{": "}", "[": "]"}
_NAME_KEYS = ('"name"', '"tool_name"')
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')


def value(scanner: Scanner, tell: Tell) -> Reading[None]:
    """Tell the JSON value that follows as it comes.

    Brackets that the model left open are closed where an outer one closes, or where something follows that
    can't be JSON: a marker. Line breaks as such in strings are told as JSON writes them.
    """
    first = yield from scanner.peek()
    if first == '"':
        yield from string(scanner, tell)
    elif first in ("{", "["):
        yield from _container(scanner, tell)
    else:
        yield from scanner.run(_SCALAR, tell)


def _container(scanner: Scanner, tell: Tell) -> Reading[None]:
    closers: list[str] = []
    while True:
        yield from scanner.run(_BETWEEN_STRINGS, tell)
        char = yield from scanner.peek()
        if char == '"':
            yield from string(scanner, tell)
        elif char in _CLOSER:
            closers.append(_CLOSER[char])
            tell((yield from scanner.chars(1)))
        elif char in ("}", "]"):
            yield from scanner.chars(1)
            while char in closers:
                tell(closers[-1])
                if closers.pop() == char:
                    break
        else:
            if char:
                tell("".join(reversed(closers)))
            return
        if not closers:
            return


def string(scanner: Scanner, tell: Tell) -> Reading[None]:
    """Tell the JSON string that follows, with its quotes."""
    tell((yield from scanner.chars(1)))
    while True:
        yield from scanner.run(_IN_STRING, tell)
        char = yield from scanner.peek()
        if char == "\\":
            tell((yield from scanner.chars(2)))
            continue
        yield from scanner.chars(1)
        if char == '"' or not char:
            tell(char)
            return
        tell(escaped(char))


def escaped(text: str) -> str:
    """Return `text` as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def arguments(scanner: Scanner, tell: Tell) -> Reading[None]:
    """Tell the arguments of a call: a JSON value, or a string that holds one; nothing and null are ``{}``."""
    if (yield from scanner.peek()) in ("{", "["):
        yield from value(scanner, tell)
        return
    pieces: list[str] = []
    yield from value(scanner, pieces.append)
    text = "".join(pieces)
    held = unquoted(text)
    if held is not None:
        tell(held.strip() or "{}")
    elif text != "null":
        tell(text)
    elif not scanner.is_over:
        tell("{}")


def unquoted(text: str) -> str | None:
    """Return the string that JSON `text` is, or None."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def call(scanner: Scanner, parts: Parts, known: Collection[str] | None = None) -> Reading[bool]:
    """Read ``{"name": ..., "arguments": {...}}`` (or ``parameters``); return whether it is a call.

    Arguments before the name wait for it. What was passed is recorded until the name is known; a call of none
    of `known` is none.
    """
    scanner.record()
    yield from scanner.chars(1)
    held: list[str] = []
    is_call, has_arguments = False, False
    while True:
        key = yield from _key(scanner)
        if not key:
            break
        if key in _NAME_KEYS and not is_call:
            pieces: list[str] = []
            yield from value(scanner, pieces.append)
            name = unquoted("".join(pieces))
            if not name or (known is not None and name not in known):
                return False
            is_call = True
            scanner.recorded()
            parts.call(name)
            parts.arguments("".join(held))
        elif key in _ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            yield from arguments(scanner, parts.arguments if is_call else held.append)
        else:
            yield from value(scanner, _nothing)
        yield from scanner.space()
        if not (yield from scanner.accept(",")):
            break
    is_closed = yield from scanner.accept("}")
    if is_call and not has_arguments and (is_closed or not scanner.is_over):
        parts.arguments("{}")
    return is_call


def _key(scanner: Scanner) -> Reading[str]:
    """Return the next key of an object, with its quotes, behind its colon; empty if there is none."""
    yield from scanner.space()
    if (yield from scanner.peek()) != '"':
        return ""
    pieces: list[str] = []
    yield from string(scanner, pieces.append)
    yield from scanner.space()
    if not (yield from scanner.accept(":")):
        return ""
    yield from scanner.space()
    return "".join(pieces)


def _nothing(text: str) -> None:
    pass


_BEFORE_CALLS = re.compile(r"[\s\[]*")
_BESIDE_CALLS = re.compile(r"[\s,;\]}]*")


def calls(scanner: Scanner, parts: Parts, known: Collection[str] | None = None) -> Reading[str | None]:
    """Read a call, several side by side, or a list of them; return the white space behind. None: no call.

    What was passed is recorded until the first name is known.
    """
    scanner.record()
    yield from scanner.word(_BEFORE_CALLS)
    space = None
    while (yield from scanner.peek()) == "{":
        if not (yield from call(scanner, parts, known)):
            if space is not None:
                parts.content(space + scanner.recorded())
                space = ""
            break
        gap = yield from scanner.word(_BESIDE_CALLS)
        space = gap[len(gap.rstrip()) :]
    return space
