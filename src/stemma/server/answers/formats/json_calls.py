"""Calls as JSON that a grammar enforces where a family's own form can't be."""

from stemma.server.answers import json_text
from stemma.server.answers.formats.format import Tools
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Reading, Scanner


def read_forced(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
    """Read a JSON list of calls."""
    if (yield from json_text.calls(scanner, parts)) is None:
        parts.content(scanner.recorded())
    yield from scanner.all(parts.content)


def read_named(name: str, scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
    """Read the arguments of the one call that is demanded."""
    yield from scanner.space()
    if (yield from scanner.peek()):
        parts.call(name)
        yield from scanner.all(parts.arguments)
