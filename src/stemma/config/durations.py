"""Durations as people write them: ``90``, ``30m``, ``12h``, ``7d``."""

from __future__ import annotations

import math

from stemma.errors import ConfigError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: str) -> float:
    """Return the number of seconds; raise ConfigError if the text is no duration of at least 0."""
    number, unit = (text[:-1], text[-1]) if text and text[-1] in _UNITS_S else (text, "s")
    try:
        seconds = float(number) * _UNITS_S[unit]
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise ConfigError(f"not a duration: {text!r}; write e.g. 90, 30m, 12h or 7d")
    return seconds
