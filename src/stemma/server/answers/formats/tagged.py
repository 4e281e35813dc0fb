"""Calls between a marker and its end, in text: what such formats have in common."""

from __future__ import annotations

import re
from collections.abc import Callable

from stemma.server.answers import json_text
from stemma.server.answers.formats.format import ReadCalls, Tools
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Markers, Reading, Scanner

ReadBody = Callable[[Scanner, Parts, Tools], Reading[str | None]]
"""Reads what follows the opening marker, recorded; returns the white space behind. None: no call."""
_BEFORE_CLOSE = re.compile(r"[\s\]}]*")


def tagged(opener: str, closer: str, body: ReadBody) -> ReadCalls:
    """Return what reads content, and calls as ``opener body closer``. A missing closer loses nothing."""
    openers = Markers(opener)

    def read(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
        while (yield from scanner.until(openers, parts.content)) is not None:
            yield from tagged_once(scanner, parts, tools, body, opener, closer)

    return read


def tagged_once(
    scanner: Scanner, parts: Parts, tools: Tools, body: ReadBody, opener: str, closer: str
) -> Reading[None]:
    """Read what stands behind `opener`, which was passed."""
    scanner.record()
    yield from scanner.space()
    space = yield from body(scanner, parts, tools)
    unread = scanner.recorded()
    if space is None:
        parts.content(opener + unread)
    else:
        yield from close(scanner, parts, space, closer)


def close(scanner: Scanner, parts: Parts, space: str, closer: str) -> Reading[None]:
    """Pass `closer`, behind brackets too many. Without it `space`, which was passed, is content; text is."""
    gap = yield from scanner.word(_BEFORE_CLOSE)
    if not (yield from scanner.accept(closer)) or space.strip():
        parts.content(space + gap)


def json_calls(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[str | None]:
    """Read calls as JSON objects."""
    return (yield from json_text.calls(scanner, parts))
