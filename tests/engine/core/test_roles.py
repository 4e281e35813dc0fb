"""Settings of prefill, decode and pools that contradict each other are refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from stemma.engine.build import check_role
from stemma.engine.llm import engine_settings
from stemma.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"role": "prefill"}, "--pool"),
        ({"role": "decode"}, "--pool"),
        ({"role": "prefill", "pool": "redis", "pool_write": "write_back"}, "write_through"),
        ({"role": "decode", "pool": "redis", "prefetch": "best_effort"}, "best_effort"),
        ({"pool": "redis", "enable_prefix_cache": False}, "enable_prefix_cache"),
    ],
)
def test_contradictions(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_role(engine_settings(Path("model"), **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pool": "redis", "pool_write": "write_back"},
        {"role": "prefill", "pool": "redis"},
        {"role": "decode", "pool": "redis", "enable_prefix_cache": False},
    ],
)
def test_what_goes_together(fields: dict[str, object]) -> None:
    check_role(engine_settings(Path("model"), **fields))
