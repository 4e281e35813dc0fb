from __future__ import annotations

import pytest

from stemma.config.durations import parse_duration
from stemma.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("0", 0), ("1.5m", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "x", "-1h", "nan", "inf", "1e999", "7 weeks"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration(text)
