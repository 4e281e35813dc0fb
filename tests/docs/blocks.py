"""The blocks of commands on the pages under `docs/start` and `docs/how-to`, and how each is checked.

A comment in the line above a block says it: ``<!-- run -->``: a test runs it against a server of the demo;
``<!-- serve -->``: it starts servers, and its settings are checked; ``<!-- not run: REASON -->``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for room in ("start", "how-to") for page in (ROOT / "docs" / room).glob("*.md"))
_BLOCK = re.compile(r"(?:^<!-- (?P<how>.*?) -->\n)?^```(?:bash|sh|console)\n(?P<text>.*?)^```$", re.M | re.S)
_ASSIGNMENT = re.compile(r"\w+=\S*")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    how: str
    """What the comment above it says."""
    text: str

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command, without assignments before it and comments behind it."""
        lines = re.sub(r"<<'END'\n.*?\nEND\n", "\n", self.text, flags=re.S)
        lines = re.sub(r"(?:^|\s+)# .*$|(?:^|\s+)#$", "", lines, flags=re.M)
        lexer = shlex.shlex(lines.replace("\\\n", " "), posix=True, punctuation_chars="&|<>;\n")
        lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
        words: list[str] = []
        for word in [*lexer, "\n"]:
            if set(word) <= set("&|<>;\n"):
                while words and _ASSIGNMENT.fullmatch(words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def blocks() -> list[Block]:
    """Return every block, page by page."""
    return [
        Block(page, found["how"] or "", found["text"])
        for page in PAGES
        for found in _BLOCK.finditer(page.read_text())
    ]
