"""Tables and texts as Markdown has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells may hold any text."""
    lines = [head, ["---"] * len(head), *([cell(text) for text in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def cell(text: str) -> str:
    """Return a text in one line, without what ends a cell."""
    return " ".join(text.split()).replace("|", "\\|")


def prose(docstring: str | None) -> str:
    """Return a docstring's text: one kind of backquotes, and nothing that reads as HTML."""
    text = " ".join((docstring or "").split())
    return re.sub(r"`+([^`]+)`+", r"`\1`", text).replace("<", "&lt;")
