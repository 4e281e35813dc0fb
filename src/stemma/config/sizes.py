"""Byte sizes as people write them: ``4GB``, ``512MiB``, ``1073741824``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from stemma.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int) -> int:
    """Return the number of bytes; raise ConfigError if the text is no size."""
    if isinstance(text, int):
        return text
    found = _PATTERN.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise ConfigError(f"not a size: {text!r}; write e.g. 4GB, 512MiB or 1073741824")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def format_size(num_bytes: float) -> str:
    """Return a short decimal form, e.g. ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


ByteSize = Annotated[int, BeforeValidator(parse_size), PlainSerializer(int)]
"""A pydantic field type: an int, or a string that `parse_size` reads."""
