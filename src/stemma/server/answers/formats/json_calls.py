"""Calls that a request demands: in the family's own form, or as a JSON list."""

from stemma.server.answers import json_text
from stemma.server.answers.formats.format import ReadCalls, Tools
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Reading, Scanner


def read_forced(own: ReadCalls | None, scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
    """Read calls as `own` does if they aren't a JSON list."""
    begin = yield from scanner.accept("[{")
    if begin:
        scanner.back(begin)
    if own is not None and not begin:
        yield from own(scanner, parts, tools)
        return
    if (yield from json_text.calls(scanner, parts)) is None:
        parts.content(scanner.recorded())
    yield from scanner.all(parts.content)
