"""What a format is: how it is read, and how a template that writes it is recognized."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stemma.server.answers.formats.forced import CallForm
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Reading, Scanner

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by name: the tools that an answer may call."""
ReadCalls = Callable[[Scanner, Parts, Tools], Reading[None]]
"""Reads an answer behind its thinking: content and calls."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes its calls."""

    name: str
    read: ReadCalls
    shape: re.Pattern[str]
    """Matches a call as templates write it, with its marks in their places."""
    opens: tuple[str, ...]
    """Markers that begin calls; empty: nothing marks them."""
    others: tuple[str, ...] = ()
    """Further markers. None of all may be left out of the text, special token or not."""
    form: CallForm | None = None
    """How calls that a request demands are written; None: as a JSON list."""
    short_ids: bool = False
    """Whether the template takes only ids of nine letters and digits."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that must stay in the text."""
        return self.opens + self.others


NAME, KEY, VALUE = "marked_tool", "marked_key", "marked_value"
"""The call that templates are shown."""


def shape(pattern: str) -> re.Pattern[str]:
    """Compile `pattern`: spaces stand for any white space."""
    for word, mark in (("NAME", NAME), ("KEY", KEY), ("VALUE", VALUE)):
        pattern = pattern.replace(word, mark)
    return re.compile(pattern.replace(" ", r"\s*"))
