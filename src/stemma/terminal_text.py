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


def format_duration(seconds: float) -> str:
    """Return a duration with one unit, e.g. ``41 min``."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{1000 * seconds:.0f} ms"
