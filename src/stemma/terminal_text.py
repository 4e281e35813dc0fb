"""Text from servers and clients as a terminal may show it: it must not obey a character of it."""

from __future__ import annotations

from typing import Any


def visible(text: str) -> str:
    """Return `text` on one line, with control characters escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def visible_lines(text: str) -> str:
    """Do the same, but leave ends of lines and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def visible_json(value: Any) -> Any:
    """Return JSON with all its texts as `visible_lines` gives them."""
    if isinstance(value, str):
        return visible_lines(value)
    if isinstance(value, list):
        return [visible_json(one) for one in value]
    if isinstance(value, dict):
        return {visible_lines(name): visible_json(one) for name, one in value.items()}
    return value
